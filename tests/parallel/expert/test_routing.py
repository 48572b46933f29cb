"""Pipelines that record and replay the choices of their routers, and take choices of a batch."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from penstock import AutoPipeline, Axes, Pipeline
from penstock.batch.padding import Padding
from penstock.errors import ConfigError, ModelError
from penstock.parallel.expert.replay import StageRouting
from penstock.train.config.load import load_config
from penstock.train.settings import make_auto
from support import zoo
from support.covering import every
from support.families import ragged_batch, tiny_model
from support.mesh import batch, build_whole, error_of, full, later, own_part, same_on_all
from support.mixtures import mixture, routers
from support.pool import Pool
from support.reference import Gradients, assert_gradients, gradients_of, plain_step, plain_steps
from support.refusals import refuses

MICROBATCHES = 4
LAYERS = 4
EXPERTS, TOP_K = 4, 2
Case = tuple[str, int, Axes | None, Any, dict[str, Any]]  # model type, ranks, axes, schedule, options


def model_of(model_type: str) -> PreTrainedModel:
    return mixture(model_type, torch.float64, layers=LAYERS)


def again() -> bool:
    """Whether something is run again in a backward."""
    return torch._C._current_graph_task_id() != -1


def direction(weight: Tensor, seed: int) -> Tensor:
    return torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed)).to(weight)


def tied(model: PreTrainedModel, size: float) -> PreTrainedModel:
    """All experts of each router are tied, but for less than `size`."""
    with torch.no_grad():
        for router in routers(model):
            weight = router.get_parameter("weight")
            weight.copy_(weight[:1] + 0.1 * size * direction(weight, 2))
            if "bias" in router._parameters:
                router.get_parameter("bias").zero_()
    return model


def flipping(size: float, module: nn.Module) -> nn.Module:
    """Its routers differ by `size` when they are run again: so do gradients, but choices among experts that
    are tied turn over."""

    def nudge(router: nn.Module, _: Any) -> None:
        weight = router._parameters["weight"]
        assert weight is not None
        if again():
            vars(router)["weight"] = weight + size * direction(weight, 3)

    def over(router: nn.Module, *_: Any) -> None:
        vars(router).pop("weight", None)

    for router in routers(module):
        router.register_forward_pre_hook(nudge)
        router.register_forward_hook(over)
    return module


def gradients(pipe: Pipeline) -> Gradients:
    return {name: full(gradient) for name, gradient in gradients_of(pipe).items()}


def assert_exact(pipe: Pipeline, expected: Gradients, tolerance: float) -> None:
    found = gradients(pipe)
    assert found.keys() == expected.keys() & dict(pipe.named_parameters(remove_duplicate=False)).keys()
    assert_gradients(found, expected, tolerance)


def build(model: PreTrainedModel, case: Case, **more: Any) -> Pipeline:
    _, ranks, axes, schedule, options = case
    options = {"schedule": schedule, "microbatches": MICROBATCHES, **options, **more}
    return build_whole(model, ranks, axes, **options)


def left(pipe: Pipeline) -> int:
    return sum(stage.left_over for stage in pipe.stages)


def recomputed(case: Case, size: float, without: bool) -> None:
    """Steps with activation checkpointing, and routers that differ by `size` where they run again, have the
    gradients of a plain step but for what routers differ by. Evaluations in between change nothing.

    without: expect other gradients where choices are not replayed
    """
    model = tied(model_of(case[0]), size)
    if without:
        model.set_experts_implementation("batched_mm")  # whose shapes do not depend on what was chosen
    pipe = build(model, case)
    mine = own_part(batch(16), *pipe.batch_part)
    loss, expected = pipe.step(mine).loss, gradients(pipe)
    pipe.close()
    more = {"activation_checkpointing": True, "parallelize_fn": functools.partial(flipping, size)}
    for replayed in (True, False) if without else (True,):
        pipe = build(model, case, replay_routing=replayed, **more)
        for _ in range(2):
            assert pipe.step(mine).loss == loss
            with nullcontext() if replayed else pytest.raises(AssertionError, match="differs by"):
                assert_exact(pipe, expected, 1e3 * size)
            pipe.zero_grad()
            pipe.evaluate(mine)
            assert not left(pipe)
        pipe.close()


def some_choices(rows: int, length: int, mixtures: int = LAYERS, seed: int = 0) -> Tensor:
    """Two different experts for each token in each layer, and some tokens that are left to the router."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(rows, length, mixtures, EXPERTS, generator=generator)
    chosen = scores.argsort(-1)[..., :TOP_K]
    chosen[:, -1] = -1
    chosen[0, 2, 1] = -1
    return chosen


@contextmanager
def forced_to_choose(given: list[Tensor]) -> Iterator[list[Tensor]]:
    """Every top-k among experts takes what is given, one after the other; yields what each chose. There is
    nothing of penstock in it."""
    plain, made = torch.topk, list[Tensor]()

    def topk(input: Tensor, k: int, dim: int = -1, **options: Any) -> Any:
        values, own = plain(input, k, dim=dim, **options)
        if input.shape[-1] != EXPERTS:
            return values, own
        chosen = given[len(made)]
        made.append(torch.where(chosen < 0, own, chosen))
        return input.gather(-1, made[-1]), made[-1]

    with mock.patch.object(torch, "topk", topk):
        yield made


def forced(
    model: PreTrainedModel, microbatches: list[dict[str, Tensor]], given: list[Tensor]
) -> tuple[float, Gradients, list[Tensor]]:
    """Loss and gradients of one plain process whose routers choose what is given, and all that was chosen."""
    layers = [layer for each in given for layer in each.flatten(0, 1).unbind(1)]
    with forced_to_choose(layers) as made:
        loss, expected = plain_steps(model, microbatches)
    assert len(made) == len(layers)
    left = iter(made)
    chosen = [torch.stack([next(left) for _ in range(each.shape[2])], 1).view_as(each) for each in given]
    return loss, expected, chosen


def replayed(case: Case, length: int) -> None:
    """A step whose choices are given, one that chooses by itself, and one given what the first recorded."""
    model, whole = model_of(case[0]), batch(16, length)
    given = some_choices(16, length, len(routers(model)))
    loss, expected, (chosen,) = forced(model, [whole], [given])
    pipe = build(model, case, replay_routing=True)
    part, parts = pipe.batch_part
    mine, recorded = own_part(whole, part, parts), chosen.chunk(parts)[part]
    same = loss, expected
    for (loss, expected), experts in (
        (same, given.chunk(parts)[part]),
        (plain_step(model, whole), None),
        (same, recorded.short()),
    ):
        entries: dict[str, Any] = {} if experts is None else {"routed_experts": experts}
        assert pipe.evaluate(mine, **entries).loss == pytest.approx(loss, rel=1e-10)
        assert pipe.step(mine, **entries).loss == pytest.approx(loss, rel=1e-10)
        assert_exact(pipe, expected, 1e-10)
        pipe.zero_grad()
        pipe.evaluate(mine)
        assert not left(pipe)
        found = pipe.routed_experts()
        assert isinstance(found, Tensor)
        assert experts is None or torch.equal(found.long(), recorded)
    pipe.close()


def ragged(case: Case, parts: int) -> None:
    """Microbatches of different lengths, each with its own choices; one of them without any."""
    model = model_of(case[0])
    whole = [batch(2, 9 + 3 * (at % 3)) for at in range(MICROBATCHES * parts)]
    mixtures = len(routers(model))
    given = [some_choices(2, each["input_ids"].shape[1], mixtures, at) for at, each in enumerate(whole)]
    for each in given[1::MICROBATCHES]:
        each.fill_(-1)
    loss, expected, chosen = forced(model, whole, given)
    pipe = build(model, case, replay_routing=True)
    first = pipe.batch_part[0] * MICROBATCHES
    mine = [{**whole[at], "routed_experts": given[at]} for at in range(first, first + MICROBATCHES)]
    del mine[1]["routed_experts"]
    assert pipe.step(mine).loss == pytest.approx(loss, rel=1e-10)
    assert_exact(pipe, expected, 1e-10)
    found = pipe.routed_experts()
    for at, recorded in enumerate(found.chunk(MICROBATCHES) if isinstance(found, Tensor) else found, first):
        assert torch.equal(recorded[:, : chosen[at].shape[1]].long(), chosen[at]), at
    pipe.close()


def wrong_choices(kind: str, rows: int, length: int) -> Any:
    good = some_choices(rows, length)
    bad = good.clone()
    if kind == "out of range":
        bad[1, 3, 2, 0] = EXPERTS
    if kind == "twice":
        bad[1, 3, 2] = 1
    if kind == "half given":
        bad[1, 3, 2, 0] = -1
    shapes = {"a layer less": good[:, :, 1:], "another top-k": good[..., :1], "short": good[:, 1:],
              "no mixtures": good[:, :, 0], "rows": good[1:]}  # fmt: skip
    dtypes = {"floats": torch.float32, "bytes": torch.uint8, "bools": torch.bool}
    if kind in dtypes:
        return good.to(dtypes[kind])
    return good.tolist() if kind == "a list" else shapes.get(kind, bad)


def refused_choices(case: Case, kinds: list[str]) -> dict[str, list[str]]:
    """By what is wrong, what a step and an evaluation say; a good step follows."""
    model, whole = model_of(case[0]), batch(16)
    pipe, plain = build(model, case, replay_routing=True), build(model, case)
    part, parts = pipe.batch_part
    mine = own_part(whole, part, parts)
    found = {"no step": [error_of(lambda: pipe.routed_experts()), error_of(lambda: plain.routed_experts())]}
    for kind in kinds:
        choices = wrong_choices(kind, len(mine["input_ids"]), 12)
        if part != parts - 1:  # one part of the batch alone
            choices = some_choices(len(mine["input_ids"]), 12)
        given = {"routed_experts": choices}
        found[kind] = [
            error_of(functools.partial(call, mine, **given)) for call in (pipe.step, pipe.evaluate)
        ]
        assert not left(pipe)
    pipe.step(mine)
    good = some_choices(len(mine["input_ids"]), 12)
    found["without the option"] = [error_of(lambda: plain.step(mine, routed_experts=good))]
    found["compared"] = [error_of(lambda: pipe.verify_against(model, {**mine, "routed_experts": good}))]
    pipe.verify_against(model, mine)
    assert not left(pipe)
    for each in (pipe, plain):
        each.close()
    return found


CHECKPOINTED = {"activation_checkpointing": True}
RING, PADDED = {"context": "ring"}, {"shapes": "padded"}
SHARDED_EXPERTS = Axes(dp_shard=2, ep=2)


@pytest.mark.parametrize(
    ("case", "size"),  # by how much routers differ: gpt_oss chooses in float64, the other in float32
    every(2, [(("gpt_oss", 2, None, "zb_h1", {}), 1e-13), (("qwen3_moe", 2, None, "1f1b", {}), 1e-6)]),
)
def test_replay_keeps_gradients_where_routers_flip(case: Case, size: float) -> None:
    recomputed(case, size, without=True)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_the_first_step_keeps_the_products_of_each_forward_apart(schedule: str) -> None:
    """In it routers run once more, to be learnt: selective checkpointing must not keep that as theirs."""
    model, whole = model_of("mixtral"), batch(16)
    loss, expected = plain_step(model, whole)
    case: Case = ("mixtral", 2, None, schedule, {"activation_checkpointing": "selective"})
    pipe = build(model, case, replay_routing=True)
    assert pipe.step(whole).loss == pytest.approx(loss, rel=1e-10)
    assert_exact(pipe, expected, 1e-10)


@pytest.mark.parallel
def test_replay_keeps_gradients_where_routers_of_sharded_experts_flip(pool: Pool) -> None:
    """Without replay the shapes of what is sent differ, which is an error."""
    pool.run(4, recomputed, ("mixtral", 2, SHARDED_EXPERTS, "dualpipe_v", {}), 1e-6, False)


def test_a_step_that_fails_leaves_nothing_behind() -> None:
    """And the next one is as it should be."""
    model, whole = model_of("mixtral"), batch(16)
    fails: list[bool] = []

    def fail(module: nn.Module, *_: Any) -> None:
        if fails:
            raise ValueError("broken on purpose")

    def around(module: nn.Module) -> nn.Module:
        for router in routers(module)[-1:]:
            router.register_forward_hook(fail)
        return module

    loss, expected = plain_step(model, whole)
    case: Case = ("mixtral", 2, None, "zb_h1", CHECKPOINTED)
    pipe = build(model, case, replay_routing=True, parallelize_fn=around)
    pipe.step(whole)
    before = pipe.routed_experts()
    fails.append(True)
    with pytest.raises(ValueError, match="broken on purpose"):
        pipe.step(whole)
    assert not left(pipe)
    assert not any(routing.recorded for stage in pipe.stages if (routing := stage.part(StageRouting)))
    fails.clear()
    pipe.zero_grad()
    assert pipe.step(whole).loss == pytest.approx(loss, rel=1e-10)
    assert_exact(pipe, expected, 1e-10)
    assert torch.equal(torch.as_tensor(pipe.routed_experts()), torch.as_tensor(before))


GIVEN: list[tuple[int, Case, int]] = [
    (2, ("qwen3_moe", 2, None, "zb_h1", CHECKPOINTED), 12),
    (4, ("mixtral", 2, Axes(cp=2), "1f1b", {**RING, **CHECKPOINTED}), 13),
    (4, ("qwen3_moe", 2, SHARDED_EXPERTS, "dualpipe_v", CHECKPOINTED), 12),
    (2, ("olmoe", 2, None, "dualpipe", CHECKPOINTED), 12),
    (4, ("mixtral", 2, Axes(tp=2), "zb_v", CHECKPOINTED), 12),
    (4, ("mixtral", 2, Axes(tp=2), "1f1b", {"sequence_parallel": True}), 12),
    (4, ("qwen3_moe", 1, Axes(dp_replicate=2, cp=2, ep=2), "1f1b", CHECKPOINTED), 12),
    (2, ("mixtral", 2, None, "dualpipe_v", {**CHECKPOINTED, "shapes": "exchanged"}), 12),
    (4, ("mixtral", 2, Axes(dp_shard=2), "interleaved_1f1b", {"exchange": "batched"}), 12),
]
RAGGED: list[tuple[int, Case]] = [
    (2, ("mixtral", 2, None, "zb_h1", {**CHECKPOINTED, **PADDED})),
    (2, ("mixtral", 2, None, "1f1b", CHECKPOINTED)),
    (4, ("qwen3_moe", 2, Axes(cp=2), "1f1b", PADDED)),
    (4, ("mixtral", 2, SHARDED_EXPERTS, "dualpipe_v", {**CHECKPOINTED, **PADDED})),
]


@pytest.mark.parametrize(("processes", "case", "length"), [GIVEN[0], *later(*GIVEN[1:])])
def test_choices_of_a_batch(pool: Pool, processes: int, case: Case, length: int) -> None:
    """As one plain process whose routers get the same choices; recorded ones have the same form."""
    pool.run(processes, replayed, case, length)


@pytest.mark.parametrize(("processes", "case"), [*RAGGED[:1], *later(*RAGGED[1:])])
def test_microbatches_of_different_lengths(pool: Pool, processes: int, case: Case) -> None:
    pool.run(processes, ragged, case, 1 if case[2] is None else case[2].batch_parts)


CHOICES = {
    "out of range": r"routed_experts \[4, \d\] in row 1, token 3, mixture 2.* its 4 experts",
    "twice": r"routed_experts \[1, 1\] in row 1, token 3, mixture 2",
    "half given": r"routed_experts \[-1, \d\] in row 1",
    "a layer less": r"shape \[\d, 12, 3, 2\].* are \[\d, 12, 4, 2\]",
    "another top-k": r"shape \[\d, 12, 4, 1\]",
    "short": r"shape \[\d, 11, 4, 2\]",
    "no mixtures": r"shape \[\d, 12, 2\]",
    "rows": r"input_ids: \d+, labels: \d+, routed_experts: \d+",
    "floats": r"routed_experts of torch.float32.* int16, int32 or int64",
    "bytes": r"routed_experts of torch.uint8",
    "bools": r"routed_experts of torch.bool",
    "a list": r"routed_experts given as list",
}


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("axes", "options"),
    [(Axes(dp_shard=2), {}), pytest.param(None, PADDED, marks=pytest.mark.parallel)],
)
def test_choices_that_no_router_can_make_are_refused(
    pool: Pool, axes: Axes | None, options: dict[str, Any]
) -> None:
    """On every rank, also where one part of the batch alone has them."""
    case: Case = ("mixtral", 2, axes, "1f1b", options)
    found = same_on_all(pool.run(2 if axes is None else 4, refused_choices, case, list(CHOICES)))
    expected = {name: f"BatchError: .*{words}" for name, words in CHOICES.items()} | {
        "without the option": r"BatchError: 'routed_experts' in a batch: .* replay_routing=True$",
        "compared": "BatchError: routed_experts in a comparison",
        "no step": r"ConfigError: routed_experts\(\) of 0 microbatches.* Call step\(\) first$",
    }
    assert found.keys() == expected.keys()
    for name, message in expected.items():
        assert all(re.match(message, words) for words in found[name]), found[name]


def build_plan(model: Any) -> None:
    AutoPipeline(ranks=2, microbatches=2, replay_routing=True).build_plan(model)


def test_models_that_cannot_be_replayed_are_refused() -> None:
    """Before anything is read or joined."""
    with refuses(ConfigError, "routing replay of LlamaForCausalLM", "experts"):
        build_plan(tiny_model("llama"))
    with refuses(ModelError, "model.layers.0.mlp.experts", "the one top-k"):
        build_plan(zoo.tiny_model("phimoe"))
    twice = tiny_model("mixtral", layers=2)
    twice.model.layers[1].mlp = twice.model.layers[0].mlp
    with refuses(ModelError, "model.layers.0.mlp.experts, called twice in one forward"):
        build_plan(twice)
    build_plan(tiny_model("mixtral").config)  # without values


def test_the_trainer_passes_replay_routing_on(tmp_path: Path) -> None:
    text = "model: {config: {model_type: mixtral}}\ndata: {path: some.txt, tokenizer: bytes}\n"
    (tmp_path / "run.yaml").write_text(text)
    for value in (True, False):
        config = load_config(tmp_path / "run.yaml", [f"train.replay_routing={value}"])
        assert make_auto(config).replay_routing is value


def test_the_choices_of_padded_rows_are_those_of_their_tokens() -> None:
    """0.5.0: `routed_experts` returned rows with their padding, which `step` refused for the same batch."""
    model = tiny_model("mixtral")
    options: dict[str, Any] = {"ranks": 2, "microbatches": 3, "replay_routing": True}
    pipe = AutoPipeline(**options, shapes=Padding(multiple=8)).build(model)
    batch = ragged_batch(7, 10)
    loss, found = pipe.step(batch).loss, pipe.routed_experts()
    assert isinstance(found, Tensor)
    assert found.shape[:2] == (7, 10)
    assert pipe.step(batch, routed_experts=found).loss == loss
    rows = [
        {name: value[at : at + 2, :n] for name, value in batch.items()} for at, n in ((0, 5), (2, 9), (4, 7))
    ]
    padded = AutoPipeline(**options, shapes="padded").build(model)
    loss, each = padded.step(rows).loss, padded.routed_experts()
    assert [chosen.shape[:2] for chosen in each] == [(2, 5), (2, 9), (2, 7)]
    again = [{**row, "routed_experts": chosen} for row, chosen in zip(rows, each, strict=True)]
    assert padded.step(again).loss == loss
