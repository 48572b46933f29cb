"""What the pool's workers run."""

from __future__ import annotations

import gc
import os
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from penstock import AutoPipeline, Pipeline
from penstock.errors import BatchError, HandshakeError, ModelError, PenstockError
from penstock.models.activation_checkpointing import Checkpointing
from penstock.models.stage import StageInfo
from penstock.runtime.transport import channels
from penstock.runtime.transport.groups import Groups
from penstock.schedule.choose import ScheduleLike
from support.families import ragged_batch, tiny_config, tiny_model
from support.ragged import Microbatches, apart, documents, packed, ragged
from support.reference import assert_every_gradient, assert_gradients, gradients_of, plain_step, plain_steps

Case = tuple[ScheduleLike, int]  # schedule, microbatches
_TRANSPORTS = (None, "gloo")  # on one host, None is shared memory


def equivalence(family: str, tied: bool, ranks: int, cases: Sequence[Case], layers: int = 4) -> None:
    """Each case's gradients on this rank are those of a plain process, and its ops ran in order."""
    model, batch = tiny_model(family, tied=tied, layers=layers), ragged_batch()
    loss, expected = plain_step(model, batch)
    for place, (schedule, microbatches) in enumerate(cases):
        pipe = AutoPipeline(
            ranks=ranks,
            schedule=schedule,
            microbatches=microbatches,
            timeout=30,
            transport=_TRANSPORTS[place % 2],
        ).build(model)
        assert pipe.step(batch).loss == pytest.approx(loss, abs=1e-5), (schedule, microbatches)
        assert_every_gradient(pipe.modules.values(), expected, 1e-5)
        assert pipe.timeline.peak_live == pipe.proof.peak_live
        ran = tuple(span.op for span in pipe.timeline.of_rank(dist.get_rank()))
        assert ran == pipe.schedule.programs[dist.get_rank()]
        pipe.close()


def any_shape(
    ranks: int, schedules: Sequence[ScheduleLike], shapes: Any, layers: int, turn: int | None = None
) -> None:
    """Ragged microbatches, packed documents, and checkpointed layers in each schedule.

    turn: take one of the three for each schedule, beginning at this one; None for all
    """
    model, rows = tiny_model("llama", layers=layers, tied=True), documents(8)
    cases: list[tuple[Microbatches, Microbatches, bool | Checkpointing]]
    cases = [(ragged(8), ragged(8), False), (packed(rows), apart(rows), False),
             (ragged(8, 1), ragged(8, 1), Checkpointing(in_flight=2))]  # fmt: skip
    runs = [
        (schedule, case)
        for place, schedule in enumerate(schedules)
        for case in (cases if turn is None else [cases[(turn + place) % 3]])
    ]
    for place, (schedule, (microbatches, alone, checkpointing)) in enumerate(runs):
        loss, expected = plain_steps(model, alone)
        pipe = AutoPipeline(
            ranks=ranks, schedule=schedule, microbatches=8, timeout=30, shapes=shapes,
            activation_checkpointing=checkpointing, transport=_TRANSPORTS[place % 2],
        ).build(model)  # fmt: skip
        for _ in range(2):
            pipe.zero_grad()
            assert pipe.step(microbatches).loss == pytest.approx(loss, abs=1e-5), schedule
        assert_every_gradient(pipe.modules.values(), expected, 1e-5)
        pipe.close()


def shapes(ranks: int) -> None:
    """Steps and an evaluation of different shapes one after the other."""
    model = tiny_model("llama")
    pipe = AutoPipeline(ranks=ranks, microbatches=4, timeout=30).build(model)
    for rows, length in ((8, 10), (5, 7), (9, 16), (8, 10)):
        batch = ragged_batch(rows, length)
        loss, expected = plain_step(model, batch)
        pipe.zero_grad()
        assert pipe.step(batch).loss == pytest.approx(loss, abs=1e-5)
        gradients = gradients_of(pipe)
        assert abs(pipe.evaluate(ragged_batch(3, length)).loss) > 0
        assert_gradients(gradients, expected, 1e-5)


def results(family: str, ranks: int, microbatches: int, **options: Any) -> Any:
    """Loss, norm and evaluation as this rank sees them."""
    auto = AutoPipeline(ranks=ranks, microbatches=microbatches, timeout=30, **options)
    pipe = auto.build(tiny_model(family))
    before = pipe.evaluate(ragged_batch())
    result = pipe.step(ragged_batch())
    norm = pipe.clip_grad_norm_(0.5)
    return before.loss, result.loss, result.tokens, result.bubble, norm, pipe.clip_grad_norm_(0.5)


def errors(action: str) -> str:
    """The typed error that `action` ends in on this rank, in words."""
    meshes: dict[str, Callable[[], DeviceMesh]] = {
        "mesh": lambda: init_device_mesh("cpu", (2,), mesh_dim_names=("pp",)),
        "order": lambda: DeviceMesh("cpu", [1, 0], mesh_dim_names=("pp",)),
        "axis": lambda: init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)),
    }
    mesh = meshes[action]() if action in meshes else None
    ranks = {"world": 3, "mesh": 4}.get(action, 2)
    try:
        pipe = AutoPipeline(ranks=ranks, microbatches=2, timeout=20, mesh=mesh).build(tiny_config("llama"))
        pipe.step(ragged_batch())
        rank = dist.get_rank()
        batches = {"other length": ragged_batch(8, 10 + rank), "other tokens": other_tokens(rank)}
        try:
            pipe.step(batches[action])
        except BatchError:
            pipe.step(ragged_batch())  # nothing of the refused one is left on the way
            raise
    except PenstockError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def other_tokens(rank: int) -> dict[str, Tensor]:
    batch = ragged_batch()
    batch["input_ids"][3, 4] += rank
    return batch


def two_pipelines(dp: int) -> list[Any]:
    """Slices of a mesh, `dp` pipelines of two ranks: each gives the numbers of a plain process."""
    mesh = init_device_mesh("cpu", (dp, 2), mesh_dim_names=("dp_replicate", "pp"))
    model = tiny_model("llama", tied=True)
    pipe = AutoPipeline(ranks=2, microbatches=3, mesh=mesh["pp"], timeout=30).build(model)
    batch = ragged_batch(6 + mesh.get_local_rank("dp_replicate"))
    result = pipe.step(batch)
    loss, expected = plain_step(model, batch)
    assert abs(result.loss - loss) < 1e-5
    assert_gradients(gradients_of(pipe), expected, 1e-5)
    return pipe.processes.gather([result.loss, dist.get_rank()])


def clock() -> tuple[float, float, float, list[int]]:
    """Start and end of a step on the clock that all share, its makespan, and the ranks that computed."""
    pipe = AutoPipeline(ranks=2, microbatches=2, timeout=30).build(tiny_config("llama"))
    start = time.perf_counter()
    pipe.step(ragged_batch())
    end = time.perf_counter()
    return start, end, pipe.timeline.makespan, sorted({span.rank for span in pipe.timeline.spans})


def end_behind_a_slow_rank(seconds: float) -> float:
    """The end of a step on the clock that all share. Rank 0 spends `seconds` more in each backward."""
    pipe = AutoPipeline(ranks=2, microbatches=2, timeout=30).build(tiny_config("llama"))
    if dist.get_rank() == 0:
        next(iter(pipe.parameters())).register_hook(lambda gradient: time.sleep(seconds))  # type: ignore[no-untyped-call]
    pipe.step(ragged_batch())
    return time.perf_counter()


def group_per_channel(ranks: int) -> None:
    """The channels as NCCL gets them where messages go one by one, over gloo."""
    usual = channels.open_p2p_groups

    def as_on_nccl(groups: Groups, *args: Any) -> Any:
        as_nccl = SimpleNamespace(backend="nccl", new=groups.new, size=groups.size)
        return usual(cast("Groups", as_nccl), *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(channels, "open_p2p_groups", as_on_nccl)
        equivalence("qwen3", True, ranks, [("1f1b", 5), ("gpipe", 2)])


def replicas() -> Any:
    """Values and gradients by stage, loss and norm, of a schedule that keeps two copies of the model."""
    from pipeline.steps.test_shared_gradients import batch, made

    torch.manual_seed(dist.get_rank())
    pipe = made(timeout=30)
    values = {stage: module.state_dict() for stage, module in pipe.modules.items()}
    result = pipe.step(batch())
    gradients = {
        stage: [p.grad for p in module.parameters() if p.grad is not None]
        for stage, module in pipe.modules.items()
    }
    return values, gradients, result.loss, pipe.clip_grad_norm_(1e9)


def frozen_copies() -> list[str]:
    """What is said where one copy of a tied weight is frozen at build, and later; and once all copies are."""

    def freeze(part: nn.Module) -> nn.Module:
        for name, parameter in part.named_parameters():
            parameter.requires_grad_("embed_tokens" not in name)
        return part

    model, batch = tiny_model("llama", tied=True, layers=2), ragged_batch()
    options = AutoPipeline(ranks=2, schedule="1f1b", microbatches=2, timeout=20)
    with pytest.raises(ModelError) as at_build:
        replace(options, parallelize_fn=freeze).build(model)
    pipe = options.build(model)
    tied = [p for name, p in pipe.named_parameters() if "embed_tokens" in name or "lm_head" in name]
    if pipe.processes.index == 0:  # in one process as well
        tied[0].requires_grad_(False)
    found = []
    for _ in range(2):
        with pytest.raises(ModelError) as in_step:
            pipe.step(batch)
        found.append(str(in_step.value))
        pipe.zero_grad()
    for parameter in tied:
        parameter.requires_grad_(False)
    pipe.step(batch)
    assert [parameter.grad for parameter in tied] == [None] * len(tied)
    for parameter in tied:
        parameter.requires_grad_()
    pipe.zero_grad()
    pipe.step(batch)
    _, expected = plain_step(model, batch)
    assert_gradients(gradients_of(pipe), expected, 1e-5)
    pipe.close()
    return [str(at_build.value), *found]


def refused_builds() -> list[tuple[int, int]]:
    """Threads of this process before and after builds that a user's own function, or the handshake, ends."""

    def refuse(part: nn.Module) -> nn.Module:
        raise ValueError("not this one")

    options = AutoPipeline(ranks=2, schedule="1f1b", microbatches=2, parallelize_fn=refuse)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    differing = AutoPipeline(ranks=2, schedule="1f1b", microbatches=2 + dist.get_rank(), mesh=mesh)
    found = []
    builds: list[Callable[[], Pipeline]] = [
        lambda: options.build(tiny_model("llama", layers=2)),
        lambda: Pipeline.from_provider(
            _layer, ranks=2, schedule="1f1b", microbatches=2, parallelize_fn=refuse
        ),
        lambda: differing.build(tiny_model("llama", layers=2)),
    ]
    for build in builds:
        gc.collect()  # of what ran before
        before = _threads()
        with pytest.raises((ValueError, HandshakeError), match=r"not this one|microbatches"):
            build()
        gc.collect()  # the error's frames
        found.append((before, _threads()))
    return found


def _layer(info: StageInfo) -> nn.Module:
    return nn.Linear(4, 4)


def dropped() -> int:
    """Weights that live on of a pipeline that nobody has closed, after a step, when nothing refers to it."""
    pipe = AutoPipeline(ranks=2, microbatches=2, timeout=30).build(tiny_model("llama"))
    pipe.step(ragged_batch())
    weights = [weakref.ref(weight) for weight in pipe.parameters()]
    assert weights
    del pipe
    gc.collect()
    return sum(weight() is not None for weight in weights)


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))
