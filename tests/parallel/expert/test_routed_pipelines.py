"""Pipelines that record and replay the choices of their routers, and take choices of a batch."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from penstock import AutoPipeline, Axes, Pipeline
from penstock.errors import ConfigError, ModelError
from penstock.runtime.stage import RoutedStage
from penstock.train.config.load import load_config
from penstock.train.settings import make_auto
from support import zoo
from support.families import tiny_model
from support.mesh import batch, error_of, full, later, own_part
from support.mixtures import mixture, total_loss
from support.pool import Pool
from support.reference import Gradients, assert_gradients, plain_step

MICROBATCHES = 4
LAYERS = 4
EXPERTS, TOP_K = 4, 2
Case = tuple[str, int, Axes | None, Any, dict[str, Any]]  # model type, ranks, axes, schedule, options


def model_of(model_type: str) -> PreTrainedModel:
    return mixture(model_type, torch.float64, layers=LAYERS)


def routers(model: nn.Module) -> list[nn.Module]:
    return [part for name, part in model.named_modules() if name.endswith((".gate", ".router"))]


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


def wrong(pipe: Pipeline, expected: Gradients, tolerance: float) -> str:
    """What of its gradients is not as expected, if anything is."""
    own = {name: p.grad for name, p in pipe.named_parameters(remove_duplicate=False)}
    found = {name: full(gradient) for name, gradient in own.items() if gradient is not None}
    try:
        assert found.keys() == expected.keys() & own.keys()
        assert_gradients(found, expected, tolerance)
    except AssertionError as error:
        return str(error)
    return ""


def build(model: PreTrainedModel, case: Case, **more: Any) -> Pipeline:
    _, ranks, axes, schedule, options = case
    common = {"ranks": ranks, "schedule": schedule, "microbatches": MICROBATCHES, "axes": axes, "timeout": 30}
    return AutoPipeline(**{**common, **options, **more}).build(model)


def left(pipe: Pipeline) -> int:
    return sum(len(stage.routing.held) for stage in pipe.stages if isinstance(stage, RoutedStage))


def gradients(pipe: Pipeline) -> Gradients:
    named = pipe.named_parameters(remove_duplicate=False)
    return {name: full(p.grad).clone() for name, p in named if p.grad is not None}


def recomputed(case: Case, size: float, without: bool) -> dict[str, Any]:
    """Steps with activation checkpointing and routers that differ in it by `size`, beside a plain step.
    Evaluations in between are to change nothing. By whether choices are replayed: what is wrong.

    without: whether to look at what comes out without replay; not where it ends in an error
    """
    model = tied(model_of(case[0]), size)
    if without:
        model.set_experts_implementation("batched_mm")  # whose shapes do not tell what was chosen
    whole = batch(16)
    pipe = build(model, case)
    mine = own_part(whole, *pipe.batch_part)
    loss, expected = pipe.step(mine).loss, gradients(pipe)
    pipe.close()
    found: dict[str, Any] = {}
    more = {"activation_checkpointing": True, "parallelize_fn": functools.partial(flipping, size)}
    for replayed in (True, False) if without else (True,):
        pipe = build(model, case, replay_routing=replayed, **more)
        told = []
        for _ in range(2):
            assert pipe.step(mine).loss == loss
            told.append(wrong(pipe, expected, 1e3 * size))
            pipe.zero_grad()
            pipe.evaluate(mine)
            assert not left(pipe)
        found[str(replayed)] = told
        pipe.close()
    return found


def some_choices(rows: int, length: int, mixtures: int = LAYERS, seed: int = 0) -> Tensor:
    """Two different experts for each token in each layer, and some tokens that are left to the router."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(rows, length, mixtures, EXPERTS, generator=generator)
    chosen = scores.argsort(-1)[..., :TOP_K]
    chosen[:, -1] = -1
    chosen[0, 2, 1] = -1
    return chosen


@contextmanager
def told_what_to_choose(given: Tensor) -> Iterator[list[Tensor]]:
    """Every top-k among experts takes what is given, layer by layer; gives what each chose. There is nothing
    of penstock in it."""
    plain, made = torch.topk, list[Tensor]()

    def topk(input: Tensor, k: int, dim: int = -1, **options: Any) -> Any:
        values, own = plain(input, k, dim=dim, **options)
        if input.shape[-1] != EXPERTS:
            return values, own
        chosen = given[:, :, len(made)].flatten(0, 1)
        made.append(torch.where(chosen < 0, own, chosen))
        return input.gather(-1, made[-1]), made[-1]

    with mock.patch.object(torch, "topk", topk):
        yield made


StepRecord = tuple[float, Gradients, Tensor]


def forced(model: PreTrainedModel, whole: dict[str, Tensor], given: Tensor) -> StepRecord:
    """Loss and gradients of one plain process whose routers choose what is given, and all that was chosen."""
    with told_what_to_choose(given) as made:
        loss, expected = plain_step(model, whole)
    assert len(made) == given.shape[2]
    return loss, expected, torch.stack(made, 1).view(*given.shape)


def replayed(case: Case, length: int) -> dict[str, Any]:
    """A step whose choices are given, one that chooses by itself, and one with what the first one told."""
    model, whole = model_of(case[0]), batch(16, length)
    given = some_choices(16, length, len(routers(model)))
    loss, expected, chosen = forced(model, whole, given)
    free_loss, free = plain_step(model, whole)
    pipe = build(model, case, replay_routing=True)
    part, parts = pipe.batch_part
    mine, own = own_part(whole, part, parts), given.chunk(parts)[part]
    losses, told = [], []
    for expects, experts in ((expected, own), (free, None), (expected, chosen.chunk(parts)[part].short())):
        entries: dict[str, Any] = {} if experts is None else {"routed_experts": experts}
        losses.append((pipe.evaluate(mine, **entries).loss, pipe.step(mine, **entries).loss))
        told.append(wrong(pipe, expects, 1e-10))
        pipe.zero_grad()
        pipe.evaluate(mine)
        assert not left(pipe)
        recorded = pipe.routed_experts()
        assert isinstance(recorded, Tensor)
        if experts is not None and not torch.equal(recorded.long(), chosen.chunk(parts)[part]):
            told.append("other experts were chosen than were given")
    ran = [executor.overlapped for executor in pipe._training.executors]
    pipe.close()
    return {"losses": losses, "expected": (loss, free_loss), "wrong": [w for w in told if w], "ran": ran}


def ragged(case: Case, parts: int) -> dict[str, Any]:
    """Microbatches of different lengths, each with its own choices; one of them without any."""
    model = model_of(case[0])
    given = [batch(2, 9 + 3 * (at % 3)) for at in range(MICROBATCHES * parts)]
    items = sum(int((each["labels"][:, 1:] != -100).sum()) for each in given)
    chosen, loss = [], 0.0
    for at, each in enumerate(given):
        experts = some_choices(2, each["input_ids"].shape[1], len(routers(model)), at)
        if at % MICROBATCHES == 1:
            experts = torch.full_like(experts, -1)
        else:
            each["routed_experts"] = experts
        with told_what_to_choose(experts) as made:
            share = total_loss(model, {"input_ids": each["input_ids"], "labels": each["labels"]}) / items
        share.backward()  # type: ignore[no-untyped-call]
        loss += float(share.detach())
        chosen.append(torch.stack(made, 1).view(*experts.shape))
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    pipe = build(model, case, replay_routing=True)
    start = pipe.batch_part[0] * MICROBATCHES
    found = pipe.step(given[start : start + MICROBATCHES]).loss
    told_wrong = [wrong(pipe, expected, 1e-10)]
    recorded = pipe.routed_experts()
    by_microbatch = recorded.chunk(MICROBATCHES) if isinstance(recorded, Tensor) else recorded
    for at, theirs in enumerate(by_microbatch):
        own = chosen[start + at]
        if not torch.equal(theirs[:, : own.shape[1]].long(), own):
            told_wrong.append(f"other experts of microbatch {at}")
    pipe.close()
    return {"loss": found, "expected": loss, "wrong": [w for w in told_wrong if w]}


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
    """By what is wrong, what a step and an evaluation say; a good step follows each."""
    model, whole = model_of(case[0]), batch(16)
    pipe, plain = build(model, case, replay_routing=True), build(model, case)
    part, parts = pipe.batch_part
    mine = own_part(whole, part, parts)
    found = {"untold": [error_of(lambda: pipe.routed_experts()), error_of(lambda: plain.routed_experts())]}
    for kind in kinds:
        choices = wrong_choices(kind, len(mine["input_ids"]), 12)
        if part != parts - 1:  # one part of the batch alone
            choices = some_choices(len(mine["input_ids"]), 12)
        given = {"routed_experts": choices}
        found[kind] = [
            error_of(functools.partial(call, mine, **given)) for call in (pipe.step, pipe.evaluate)
        ]
        pipe.step(mine)
        assert not left(pipe)
    good = some_choices(len(mine["input_ids"]), 12)
    found["without the option"] = [error_of(lambda: plain.step(mine, routed_experts=good))]
    found["compared"] = [error_of(lambda: pipe.verify_against(model, {**mine, "routed_experts": good}))]
    pipe.verify_against(model, mine)
    assert not left(pipe)
    for each in (pipe, plain):
        each.close()
    return found


def broken(case: Case) -> dict[str, Any]:
    """A step that fails within a forward leaves nothing behind, and the next one is as it should be."""
    model, whole = model_of(case[0]), batch(16)
    fails: list[bool] = []

    def fail(module: nn.Module, *_: Any) -> None:
        if fails:
            raise ValueError("broken on purpose")

    def around(module: nn.Module) -> nn.Module:
        for router in routers(module)[-1:]:
            router.register_forward_hook(fail)
        return module

    loss, expected = plain_step(model, whole)
    pipe = build(model, case, replay_routing=True, activation_checkpointing=True, parallelize_fn=around)
    pipe.step(whole)
    before = pipe.routed_experts()
    fails.append(True)
    for _ in range(2):
        try:
            pipe.step(whole)
        except ValueError:
            assert not left(pipe)
            assert not any(stage.routing.recorded for stage in pipe.stages if isinstance(stage, RoutedStage))
    fails.clear()
    pipe.zero_grad()
    found = pipe.step(whole).loss
    same = torch.equal(torch.as_tensor(pipe.routed_experts()), torch.as_tensor(before))
    return {"loss": found, "expected": loss, "wrong": wrong(pipe, expected, 1e-10), "same": same}


CHECKPOINTED = {"activation_checkpointing": True}
RING, PADDED = {"context": "ring"}, {"shapes": "padded"}
EXPERTS_BESIDE = Axes(dp_shard=2, ep=2)
# processes, case, by how much routers differ; gpt_oss chooses in float64, the others in float32
FLIPS: list[Any] = [
    (2, ("gpt_oss", 2, None, "zb_h1", {}), 1e-13),
    (2, ("qwen3_moe", 2, None, "1f1b", {}), 1e-6),
    *later((4, ("mixtral", 2, EXPERTS_BESIDE, "dualpipe_v", {}), 1e-6)),
]


@pytest.mark.parametrize(("processes", "case", "size"), FLIPS)
def test_replay_keeps_gradients_where_routers_flip(
    pool: Pool, processes: int, case: Case, size: float
) -> None:
    """With replay gradients are those of a run without checkpointing, but for what routers differ by; without
    it they are others."""
    alone = case[2] is None  # else shapes differ, of what was sent too, which ends in an error
    for found in pool.run(processes, recomputed, case, size, alone):
        assert found["True"] == ["", ""]
        assert not alone or all("differs by" in told for told in found["False"])


def test_a_step_that_fails_leaves_nothing_behind() -> None:
    found = broken(("mixtral", 2, None, "zb_h1", {}))
    assert found["same"]
    assert not found["wrong"]
    assert found["loss"] == pytest.approx(found["expected"], rel=1e-10)


GIVEN: list[tuple[int, Case, int]] = [
    (2, ("qwen3_moe", 2, None, "zb_h1", CHECKPOINTED), 12),
    (4, ("mixtral", 2, Axes(cp=2), "1f1b", {**RING, **CHECKPOINTED}), 13),
    (4, ("qwen3_moe", 2, EXPERTS_BESIDE, "dualpipe_v", CHECKPOINTED), 12),
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
    (4, ("mixtral", 2, EXPERTS_BESIDE, "dualpipe_v", {**CHECKPOINTED, **PADDED})),
]


@pytest.mark.parametrize(("processes", "case", "length"), [*GIVEN[:2], *later(*GIVEN[2:])])
def test_choices_of_a_batch(pool: Pool, processes: int, case: Case, length: int) -> None:
    """As one plain process whose routers get the same choices; recorded ones have the same form."""
    for found in pool.run(processes, replayed, case, length):
        assert not found["wrong"]
        replays, free = (pytest.approx(loss, rel=1e-10) for loss in found["expected"])
        assert found["losses"] == [(replays, replays), (free, free), (replays, replays)]
        if case[3] == "dualpipe_v" and case[2] is not None:  # the last step's pairs ran side by side
            assert min(found["ran"]) > 0


@pytest.mark.parametrize(("processes", "case"), [*RAGGED[:1], *later(*RAGGED[1:])])
def test_microbatches_of_different_lengths(pool: Pool, processes: int, case: Case) -> None:
    parts = 1 if case[2] is None else case[2].batch_parts
    for found in pool.run(processes, ragged, case, parts):
        assert not found["wrong"]
        assert found["loss"] == pytest.approx(found["expected"], rel=1e-10)


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
    "a list": r"routed_experts of shape list",
}


@pytest.mark.parametrize(
    ("axes", "options"),
    [(Axes(dp_shard=2), {}), pytest.param(None, PADDED, marks=pytest.mark.parallel)],
)
def test_choices_that_no_router_can_make_are_refused(
    pool: Pool, axes: Axes | None, options: dict[str, Any]
) -> None:
    """On every rank alike, also where one part of the batch alone has them."""
    case: Case = ("mixtral", 2, axes, "1f1b", options)
    everyone = pool.run(2 if axes is None else 4, refused_choices, case, list(CHOICES))
    assert all(told == everyone[0] for told in everyone)
    for name, words in CHOICES.items():
        for told in everyone[0][name]:
            assert re.match(f"BatchError: .*{words}", told), told
    (told,) = everyone[0]["without the option"]
    assert re.match(r"BatchError: 'routed_experts' in a batch: .* replay_routing=True$", told), told
    (told,) = everyone[0]["compared"]
    assert told.startswith("BatchError: routed_experts in a comparison"), told
    for told in everyone[0]["untold"]:
        assert re.match(r"ConfigError: routed_experts\(\) of 0 microbatches.* Call step\(\) first$", told), (
            told
        )


def build_plan(model: Any) -> None:
    AutoPipeline(ranks=2, microbatches=2, replay_routing=True).build_plan(model)


def test_models_that_cannot_be_replayed_are_refused() -> None:
    """Before anything is read or joined."""
    with pytest.raises(ConfigError, match="LlamaForCausalLM: it has no experts"):
        build_plan(tiny_model("llama"))
    with pytest.raises(ModelError, match=r"layers.0.* the one top-k"):
        build_plan(zoo.tiny_model("phimoe"))
    twice = tiny_model("mixtral", layers=2)
    twice.model.layers[1].mlp = twice.model.layers[0].mlp
    with pytest.raises(ModelError, match="called twice in one forward"):
        build_plan(twice)
    build_plan(tiny_model("mixtral").config)  # without values


def test_the_trainer_passes_replay_routing_on(tmp_path: Path) -> None:
    text = "model: {config: {model_type: mixtral}}\ndata: {path: some.txt, tokenizer: bytes}\n"
    (tmp_path / "run.yaml").write_text(text)
    for value in (True, False):
        config = load_config(tmp_path / "run.yaml", [f"train.replay_routing={value}"])
        assert make_auto(config).replay_routing is value
