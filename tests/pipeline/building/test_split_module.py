"""Each step of the build by itself."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Literal

import pytest
import torch
from torch import nn

from penstock import AutoPipeline, Pipeline
from penstock.batch.payload import SINGLE, EdgeSpecs, Payload
from penstock.errors import ConfigError, EquivalenceError, ModelError, PartitionError
from penstock.models.activation_checkpointing import Checkpointing, Switch
from penstock.pipeline import (
    layers_of,
    make_schedule,
    make_stage,
    module_names,
    names_per_stage,
    own_stages,
    provider_of,
    split,
    stage_parts,
)
from support.families import tiny_config, tiny_model
from support.own_chain import WIDTH, Chain, Layer, OptionalParts, made, squares, x_batch
from support.reference import assert_gradients, gradients_of
from support.refusals import refuses

FIRST, LAST = ("embed", "layers.0"), ("layers.3", "norm", "head")


class Nested(nn.Module):
    """As nanoGPT keeps its parts."""

    def __init__(self) -> None:
        super().__init__()
        blocks = nn.ModuleList([Layer() for _ in range(3)])
        parts = {
            "wte": nn.Linear(3, WIDTH),
            "drop": nn.Dropout(0.0),
            "h": blocks,
            "ln_f": nn.LayerNorm(WIDTH),
        }
        self.transformer = nn.ModuleDict(parts)
        self.lm_head = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.transformer["drop"](self.transformer["wte"](x))
        for block in self.transformer["h"].children():
            x = block(x)
        return self.lm_head(self.transformer["ln_f"](x))


def sequence() -> nn.Module:
    return nn.Sequential(nn.Linear(3, WIDTH), *(Layer() for _ in range(3)), nn.Linear(WIDTH, 2))


def test_the_names_in_the_order_in_which_they_run() -> None:
    assert module_names(made()) == (("embed",), tuple(f"layers.{i}" for i in range(4)), ("norm", "head"))
    assert module_names(made(OptionalParts)).before == ("shift", "embed")
    assert module_names(Nested()) == (
        ("transformer.wte", "transformer.drop"),
        tuple(f"transformer.h.{i}" for i in range(3)),
        ("transformer.ln_f", "lm_head"),
    )
    assert module_names(sequence()) == ((), ("0", "1", "2", "3", "4"), ())
    plan = AutoPipeline(ranks=2, microbatches=2).build_plan(tiny_config("llama"))
    names = module_names(plan.source.model)
    assert names.before == ("model.embed_tokens",)
    assert set(names.after) == {"model.norm", "lm_head"}
    assert names_per_stage(plan.source.model, 2) == [stage.modules for stage in plan.stages]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, [FIRST, ("layers.1", "layers.2"), LAST]),
        ({"embedding_weight": 0, "head_weight": 0}, [("embed", "layers.0", "layers.1"), ("layers.2",), LAST]),
        ({"layers_per_stage": [0, 4, 0]}, [("embed",), tuple(f"layers.{i}" for i in range(4)), LAST[1:]]),
        ({"layout": "Et|tt|tL"}, [FIRST, ("layers.1", "layers.2"), LAST]),
        ({"balance": [5, 1, 1, 1]}, [FIRST, ("layers.1",), ("layers.2", *LAST)]),
        ({"first_stage_layers": 2}, [("embed", "layers.0", "layers.1"), ("layers.2",), LAST]),
    ],
)
def test_the_names_of_each_stage(said: dict[str, Any], expected: list[tuple[str, ...]]) -> None:
    assert names_per_stage(made(), 3, **said) == expected


def test_ambiguous_lists_of_layers_are_refused() -> None:
    with refuses(ModelError, "a Linear with the module lists none", "its layers are in one list"):
        names_per_stage(nn.Linear(2, 2), 2)
    two = nn.Module()
    two.encoder, two.decoder = nn.ModuleList([Layer()]), nn.ModuleList([Layer(), Layer()])
    with refuses(ModelError, "'decoder', 'encoder'"):
        names_per_stage(two, 2)
    assert names_per_stage(two, 2, layers="decoder", embedding_weight=0) == [
        ("encoder", "decoder.0"),
        ("decoder.1",),
    ]
    with refuses(ModelError, "layers='encoders'"):
        names_per_stage(two, 2, layers="encoders")


def test_a_stage_holds_the_named_modules_only() -> None:
    model = made()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    part = split(model, [FIRST, ("layers.1", "layers.2"), LAST], 1)
    held = {name for name, _ in part.named_parameters()}
    assert held == {name for name in before if name.startswith(("layers.1", "layers.2"))}
    x = torch.randn(2, WIDTH)
    layers = dict(model.named_modules())
    torch.testing.assert_close(part(x), layers["layers.2"](layers["layers.1"](x)))
    for parameter in part.parameters():
        parameter.data.zero_()
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert [number for number, _ in layers_of(part)] == [1, 2]


def test_on_meta_nothing_is_copied() -> None:
    with torch.device("meta"):
        part = split(made(), [FIRST, ("layers.1", "layers.2"), LAST], 2)
    assert all(parameter.is_meta for parameter in part.parameters())
    assert [number for number, _ in layers_of(part)] == [3]


def test_absent_modules_may_be_none() -> None:
    part = split(made(OptionalParts), [("shift", *FIRST), ("layers.1", "layers.2"), LAST], 1, absent="none")
    assert isinstance(part, OptionalParts)
    assert [part.embed, part.norm, part.head, part.shift] == [None] * 4
    assert list(part.layers) == ["1", "2"]
    listed = split(sequence(), [("0", "1"), ("2", "3", "4")], 1, absent="none")
    assert {name for name, _ in listed.named_children()} == {"2", "3", "4"}


@pytest.mark.parametrize(
    ("names", "value", "rule"),
    [
        ([FIRST, LAST], "names without layers.1.up.weight, ", "on one stage"),
        ([(*FIRST, "layer.1"), LAST], "names[0] with 'layer.1'", "no such module"),
        (
            [FIRST, ("layers.1", "layers.2", "layers.0", *LAST)],
            "names[1] with 'layers.0'",
            "stage 0 has it already",
        ),
        (
            [FIRST, ("layers.1", "layers.2", "head.weight", *LAST)],
            "names[1] with 'head'",
            "stage 1 has 'head.weight' already",
        ),
    ],
)
def test_names_that_are_refused(names: Sequence[Sequence[str]], value: str, rule: str) -> None:
    with refuses(PartitionError, value, rule):
        provider_of(made(), names)


def test_a_weight_of_two_stages_is_refused() -> None:
    model = Chain()
    model.layers[3].up.weight = model.layers[0].up.weight  # type: ignore[union-attr]
    with refuses(ModelError, "layers.0.up.weight of stage 0 and layers.3.up.weight of stage 1"):
        split(model, names_per_stage(model, 2), 0)
    assert split(model, names_per_stage(model, 1), 0)


def test_a_transformers_model_has_its_own_way() -> None:
    model = tiny_model("llama")
    with refuses(
        ModelError,
        "split() of a LlamaForCausalLM",
        "its own forward",
        "AutoPipeline(modules_per_stage=names)",
    ):
        split(model, names_per_stage(model, 2), 0)


def test_a_schedule_with_other_stages() -> None:
    with refuses(PartitionError, "names of 3 stages", "schedule has 2"):
        Pipeline.from_provider(provider_of(made(), names_per_stage(made(), 3)), ranks=2, microbatches=2)
    with refuses(ConfigError, "without ranks"):
        make_schedule("1f1b", None, 2)


Case = tuple[type[nn.Module], Literal["identity", "none"]]
CASES: list[Case] = [(Chain, "identity"), (OptionalParts, "identity"), (OptionalParts, "none"),
                     (Nested, "identity")]  # fmt: skip


@pytest.mark.parametrize(("kind", "absent"), CASES)
@pytest.mark.parametrize(("schedule", "stages"), [("1f1b", 3), ("zb_v", 4), ("dualpipe", 2)])
def test_the_gradients_are_those_of_the_whole_model(
    kind: type[nn.Module], absent: Literal["identity", "none"], schedule: str, stages: int
) -> None:
    model, batch = made(kind), x_batch()
    loss = squares(model(batch["x"]), None)
    loss.backward()  # type: ignore[no-untyped-call]
    expected = gradients_of(model)
    names = names_per_stage(model, stages, layers_per_stage=None if kind is not Nested else uneven(stages))
    ranks = 2 if schedule != "1f1b" else 3
    provider = provider_of(model, names, absent=absent)
    pipe = Pipeline.from_provider(provider, schedule=schedule, ranks=ranks, microbatches=4, loss_fn=squares)
    assert pipe.step(batch).loss == pytest.approx(float(loss.detach()), rel=1e-6)
    found = gradients_of(pipe)
    assert found.keys() == expected.keys()
    assert_gradients(found, expected, 1e-6)
    pipe.verify_against(model, batch)


class Activated(Chain):
    """Modules without parameters between those that have some, and one of buffers alone."""

    def __init__(self) -> None:
        super().__init__()
        embed, layers, norm, head = self._modules.items()
        self._modules.clear()
        added = ("table", Table()), embed, ("act", nn.Tanh()), layers, norm, ("gate", nn.Sigmoid()), head
        for name, module in added:  # in the order in which they run
            self.add_module(name, module)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.get_submodule("act")(self.embed(x))
        for layer in self.layers.children():
            x = layer(x) + self.get_submodule("table")() * 0
        return self.head(self.get_submodule("gate")(self.norm(x)))


class Table(nn.Module):
    shift: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.ones(WIDTH))

    def forward(self) -> torch.Tensor:
        return self.shift


@pytest.mark.parametrize("absent", ["identity", "none"])
def test_modules_without_parameters_stand_on_one_stage(absent: Literal["identity", "none"]) -> None:
    """0.4.0 ran them on every stage: an activation between embedding and layers as often as there were."""
    model = made(Activated)
    names = names_per_stage(model, 2)
    assert names == [("embed", "act", "layers.0", "layers.1"),
                     ("layers.2", "layers.3", "norm", "gate", "head")]  # fmt: skip
    if absent == "none":
        part = split(model, names, 1, absent="none")
        assert part.get_submodule("gate") is not None
        assert part._modules["act"] is None
        return
    assert all("table" in dict(split(model, names, stage).named_modules()) for stage in range(2))
    pipe = Pipeline.from_provider(provider_of(model, names), ranks=2, microbatches=4, loss_fn=squares)
    pipe.verify_against(model, x_batch())


class Residual(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def test_verify_against_finds_arithmetic_between_modules() -> None:
    model = made(Residual)
    split_in_two, whole = (
        Pipeline.from_provider(
            provider_of(model, names_per_stage(model, ranks)), ranks=ranks, microbatches=4, loss_fn=squares
        )
        for ranks in (2, 1)
    )
    with pytest.raises(EquivalenceError):
        split_in_two.verify_against(model, x_batch())
    whole.verify_against(model, x_batch())


def uneven(stages: int) -> list[int]:
    return {2: [2, 1], 3: [1, 2, 0], 4: [1, 1, 1, 0]}[stages]


def test_stages_by_hand() -> None:
    """All the steps one after the other, and the stages run without a pipeline."""
    model, batch = made(), x_batch()
    schedule = make_schedule("1f1b", 2, 4)
    names = names_per_stage(model, schedule.stages)
    assert [own_stages(schedule, [rank]) for rank in range(2)] == [[0], [1]]
    device = torch.device("cpu")
    parts = [copy.deepcopy(split(model, names, stage)) for stage in range(2)]
    how = stage_parts(checkpointing=Checkpointing())
    stages = [make_stage(i, part, device, how) for i, part in enumerate(parts)]
    assert all(stage.part(Switch) for stage in stages)
    with pytest.warns(DeprecationWarning, match="give checkpointing to stage_parts"):  # as 0.5.0 took it
        old = make_stage(0, copy.deepcopy(split(model, names, 0)), device, checkpointing=Checkpointing())
    assert old.part(Switch)
    sent = stages[0].infer(None, batch)
    found = stages[1].infer(Payload((sent,), EdgeSpecs.of((sent,), SINGLE)), batch)
    torch.testing.assert_close(found, model(batch["x"]))
