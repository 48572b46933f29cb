"""Weights that every stage holds a copy of: one weight, whose gradients are summed over the stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import AutoPipeline, Axes, Pipeline, StageInfo
from penstock.errors import ModelError, PartitionError
from penstock.pipeline import names_per_stage, provider_of, split
from penstock.pipeline.building.split_module import SkippedModule
from support.own_chain import WIDTH, Chain, Layer, made, squares, x_batch
from support.pool import Pool
from support.reference import assert_gradients, gradients_of
from support.refusals import refuses

STAGES = 2


class Scaled(Layer):
    """A layer that takes a weight of the model's as an argument."""

    def forward(self, hidden: Tensor, scale: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(hidden) * torch.tanh(scale)


class WithParameter(Chain):
    """Every layer takes one parameter of the model."""

    every = ("scale",)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Scaled() for _ in range(4)])
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Any:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x, self.scale)
        return self.head(self.norm(x))


class WithTable(Chain):
    """Every layer takes what a module of the model returns, and one of its weights is used nowhere."""

    every = ("table",)

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Sequential(nn.Linear(WIDTH, 3), nn.Tanh(), nn.Linear(3, WIDTH))
        self.table.unused = nn.Parameter(torch.zeros(2))
        self.layers = nn.ModuleList([Scaled() for _ in range(4)])

    def forward(self, x: Tensor) -> Any:
        table = self.table[2](self.table[1](self.table[0](torch.ones(WIDTH, dtype=x.dtype, device=x.device))))
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x, table)
        return self.head(self.norm(x))


class Holding(Layer):
    """A layer that has a module of the model as its own, too."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.shared = shared

    def forward(self, hidden: Tensor) -> Tensor:
        inner: Tensor = self.shared(hidden)
        return super().forward(hidden) + inner


class WithinLayers(Chain):
    """One block that all layers hold, as in ALBERT and Zamba; the layers list it first."""

    every = ("block",)

    def __init__(self) -> None:
        super().__init__()
        block = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([Holding(block) for _ in range(4)])
        self.block = block


KINDS: Sequence[Any] = (WithParameter, WithTable, WithinLayers)


def names_of(model: Any, stages: int) -> list[tuple[str, ...]]:
    return names_per_stage(model, stages, layers="layers", on_every_stage=model.every)


def assert_twin(pipe: Pipeline, model: Any, steps: int = 2) -> None:
    """Losses, gradients, norms and weights are those of the model, stepped in this process."""
    ours, plain = (torch.optim.Adam(each.parameters(), lr=0.05) for each in (pipe, model))
    for _ in range(steps):
        batch = x_batch(dtype=torch.float64)
        loss = squares(model(batch["x"]), None)
        loss.backward()  # type: ignore[no-untyped-call]
        assert pipe.step(batch).loss == pytest.approx(float(loss.detach()), rel=1e-10)
        named = {n: p for n, p in model.named_parameters(remove_duplicate=False) if p.grad is not None}
        found = gradients_of(pipe)
        assert found.keys() <= named.keys()
        assert_gradients(found, gradients_of(model), 1e-10)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert pipe.clip_grad_norm_(1.0) == pytest.approx(float(norm), rel=1e-10)
        for optimizer in (ours, plain):
            optimizer.step()
            optimizer.zero_grad()
    whole = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter, whole[name], rtol=1e-8, atol=1e-8)


# each kind and each schedule once in every run
@pytest.mark.parametrize(("kind", "schedule", "stages"), [
    pytest.param(kind, schedule, stages, marks=() if place == turn else pytest.mark.sweep)
    for place, kind in enumerate(KINDS)
    for turn, (schedule, stages) in enumerate((("1f1b", 2), ("zb_v", 4), ("dualpipe", 2)))
])  # fmt: skip
def test_the_twin_of_one_process(kind: Any, schedule: str, stages: int) -> None:
    model: Any = made(kind, torch.float64)
    provider = provider_of(model, names_of(model, stages), on_every_stage=model.every)
    pipe = Pipeline.from_provider(provider, schedule=schedule, ranks=2, microbatches=4, loss_fn=squares)
    kept = [getattr(module, kind.every[0]) for module in pipe.modules.values()]
    assert len(set(map(id, kept))) == len(kept)
    assert not any(isinstance(each, SkippedModule) for each in kept)
    pipe.verify_against(model, x_batch(dtype=torch.float64))
    assert_twin(pipe, model)


def over_processes(kind: int, schedule: str, stages: int, axes: Axes | None) -> list[str]:
    model: Any = made(KINDS[kind])
    provider = provider_of(model, names_of(model, stages), on_every_stage=model.every)
    pipe = Pipeline.from_provider(
        provider, schedule=schedule, ranks=2, microbatches=2, loss_fn=squares, axes=axes, timeout=30
    )
    report = pipe.compare(model, x_batch())
    norm = pipe.step(x_batch())
    del norm
    ours = pipe.clip_grad_norm_(1.0)
    loss = squares(model(x_batch()["x"]), None)
    loss.backward()  # type: ignore[no-untyped-call]
    whole = float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    pipe.close()
    return [*report.problems(), *([] if abs(ours - whole) < 1e-5 * whole else [f"norm {ours}, not {whole}"])]


@pytest.mark.parametrize("kind", [0, 2])
def test_over_processes(pool: Pool, kind: int) -> None:
    assert pool.run(2, over_processes, kind, "interleaved_1f1b", 4, None) == [[], []]


@pytest.mark.sweep
@pytest.mark.parametrize("kind", [0, 1])  # a weight that several layers hold is refused with them
@pytest.mark.parametrize("axes", [Axes(dp_shard=2), Axes(dp_replicate=2)])
@pytest.mark.parametrize(("schedule", "stages"), [("1f1b", 2), ("zb_v", 4)])
def test_with_other_axes(pool: Pool, kind: int, axes: Axes, schedule: str, stages: int) -> None:
    assert pool.run(4, over_processes, kind, schedule, stages, axes) == [[]] * 4


class Own(nn.Module):
    """A stage by hand. Each provider's call makes other values: those of the first stage count."""

    def __init__(self, info: StageInfo, name: str = "scale", width: int = WIDTH) -> None:
        super().__init__()
        self.layer = Layer()
        self.register_parameter("scale", nn.Parameter(torch.full((width,), 1.0 + info.stage)))
        self.on_every_stage = (name,)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x) * self.scale


def test_a_stage_by_hand_says_what_it_shares() -> None:
    pipe = Pipeline.from_provider(Own, ranks=2, microbatches=2, loss_fn=squares)
    scales = [module.get_parameter("scale") for module in pipe.modules.values()]
    assert [each.tolist() for each in scales] == [[1.0] * WIDTH] * 2
    pipe.step({"x": torch.randn(4, WIDTH)})
    assert scales[0].grad is not None
    torch.testing.assert_close(scales[0].grad, scales[1].grad, rtol=0, atol=0)
    assert scales[0].grad.abs().sum() > 0
    owned = [name for name, _ in pipe.owned_parameters()]
    assert owned.count("scale") == 1


def test_stages_that_do_not_agree_are_refused() -> None:
    def provider(info: StageInfo) -> nn.Module:
        return Own(info, width=WIDTH if info.is_first else 1)

    with refuses(
        ModelError, "on_every_stage with 'scale'", "6] on stage 0 and ['torch.float32', 1] on stage 1"
    ):
        Pipeline.from_provider(provider, ranks=2, microbatches=2, loss_fn=squares)

    def one(info: StageInfo) -> nn.Module:
        return Own(info) if info.is_first else Layer()

    with refuses(ModelError, "on_every_stage with 'scale'", "stage 1"):
        Pipeline.from_provider(one, ranks=2, microbatches=2, loss_fn=squares)
    with refuses(ModelError, "on_every_stage with 'scales'", "Own has nothing"):
        Pipeline.from_provider(lambda info: Own(info, "scales"), ranks=2, microbatches=2, loss_fn=squares)


@pytest.mark.parametrize(
    ("every", "value", "rule"),
    [
        (("scales",), "on_every_stage[0] with 'scales'", "no such module"),
        (("embed.weight",), "names[0] with 'embed'", "on_every_stage has 'embed.weight'"),
        (("layers",), "names[0] with 'layers.0'", "on_every_stage has 'layers'"),
    ],
)
def test_names_that_are_refused(every: tuple[str, ...], value: str, rule: str) -> None:
    model = made(WithParameter)
    with refuses(PartitionError, value, rule):
        split(model, names_per_stage(model, 2, on_every_stage=("scale",)), 0, on_every_stage=every)
    with refuses(PartitionError, "names without scale"):
        split(model, names_per_stage(model, 2, on_every_stage=("scale",)), 0)


def test_only_some_copies_frozen_are_refused() -> None:
    def frozen(module: nn.Module) -> nn.Module:
        module.get_parameter("scale").requires_grad_(False)
        return module

    model, calls = made(WithParameter), list[int]()

    def first(module: nn.Module) -> nn.Module:
        calls.append(1)
        return frozen(module) if len(calls) == 1 else module

    provider = provider_of(model, names_of(model, 2), on_every_stage=model.every)  # type: ignore[arg-type]
    with refuses(ModelError, "scale of stage 0 frozen, and scale of stage 1 not"):
        Pipeline.from_provider(provider, ranks=2, microbatches=2, loss_fn=squares, parallelize_fn=first)
    pipe = Pipeline.from_provider(provider, ranks=2, microbatches=2, loss_fn=squares, parallelize_fn=frozen)
    pipe.step(x_batch())
    assert all(module.get_parameter("scale").grad is None for module in pipe.modules.values())


def test_a_buffer_that_each_copy_would_write_into_is_refused() -> None:
    class Written(Own):
        def __init__(self, info: StageInfo) -> None:
            super().__init__(info)
            self.norm = nn.BatchNorm1d(WIDTH)
            self.on_every_stage = ("norm",)

        def forward(self, x: Tensor) -> Any:
            return self.norm(super().forward(x))

    pipe = Pipeline.from_provider(Written, ranks=2, microbatches=2, loss_fn=squares)
    with refuses(ModelError, "of stage 0, a buffer that the forward writes into", "several copies"):
        pipe.step({"x": torch.randn(8, WIDTH)})
    pipe.evaluate({"x": torch.randn(8, WIDTH)})


def test_a_weight_of_transformers_stays_where_it_runs() -> None:
    """What later layers take of it crosses the edges: AutoPipeline needs no copies."""
    assert "on_every_stage" not in AutoPipeline.__dataclass_fields__
