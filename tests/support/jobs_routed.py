"""Pipelines that record and replay what their routers choose, run by the pool's workers."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from penstock import AutoPipeline, Axes, Pipeline
from penstock.runtime.stage import RoutedStage
from support.jobs_axes import told
from support.jobs_expert import mixture, total_loss
from support.jobs_mesh import batch, full, own_part
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
    torch.set_num_threads(1)
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


# ---- choices that are given


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
    torch.set_num_threads(1)
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
    torch.set_num_threads(1)
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


# ---- what is refused


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


def refused(case: Case, kinds: list[str]) -> dict[str, list[str]]:
    """By what is wrong, what a step and an evaluation say; a good step follows each."""
    torch.set_num_threads(1)
    model, whole = model_of(case[0]), batch(16)
    pipe, plain = build(model, case, replay_routing=True), build(model, case)
    part, parts = pipe.batch_part
    mine = own_part(whole, part, parts)
    found = {"untold": [told(lambda: pipe.routed_experts()), told(lambda: plain.routed_experts())]}
    for kind in kinds:
        choices = wrong_choices(kind, len(mine["input_ids"]), 12)
        if part != parts - 1:  # one part of the batch alone
            choices = some_choices(len(mine["input_ids"]), 12)
        given = {"routed_experts": choices}
        found[kind] = [told(functools.partial(call, mine, **given)) for call in (pipe.step, pipe.evaluate)]
        pipe.step(mine)
        assert not left(pipe)
    good = some_choices(len(mine["input_ids"]), 12)
    found["without the option"] = [told(lambda: plain.step(mine, routed_experts=good))]
    found["compared"] = [told(lambda: pipe.verify_against(model, {**mine, "routed_experts": good}))]
    pipe.verify_against(model, mine)
    assert not left(pipe)
    for each in (pipe, plain):
        each.close()
    return found


def broken(case: Case) -> dict[str, Any]:
    """A step that fails within a forward leaves nothing behind, and the next one is as it should be."""
    torch.set_num_threads(1)
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
