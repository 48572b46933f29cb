"""What the pool's workers run."""

from __future__ import annotations

import gc
import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any

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
from penstock.schedule.choose import ScheduleLike
from support.families import ragged_batch, tiny_config, tiny_model
from support.ragged import Microbatches, apart, documents, packed, ragged
from support.reference import (
    TOLERANCE,
    assert_every_gradient,
    assert_gradients,
    gradients_of,
    plain_step,
    plain_steps,
)

Case = tuple[ScheduleLike, int]  # schedule, microbatches


@contextmanager
def noting(wrong: list[str], case: str) -> Iterator[None]:
    """Append a failed assertion to `wrong` and go on with the next case."""
    try:
        yield
    except AssertionError as difference:
        wrong.append(f"{case}: {difference}")


def equivalence(family: str, tied: bool, ranks: int, cases: Sequence[Case], layers: int = 4) -> list[str]:
    """Compare each case's gradients on this rank with those of a plain process; return what went wrong."""
    model, batch = tiny_model(family, tied=tied, layers=layers), ragged_batch()
    loss, expected = plain_step(model, batch)
    wrong: list[str] = []
    for schedule, microbatches in cases:
        pipe = AutoPipeline(ranks=ranks, schedule=schedule, microbatches=microbatches, timeout=30).build(
            model
        )
        result = pipe.step(batch)
        with noting(wrong, f"{family} tied={tied} P={ranks} {schedule} m={microbatches}"):
            assert abs(result.loss - loss) < 1e-5
            assert_every_gradient(pipe.modules.values(), expected, TOLERANCE[torch.float32])
            assert pipe.timeline.peak_live == pipe.proof.peak_live
            ran = tuple(span.op for span in pipe.timeline.of_rank(dist.get_rank()))
            assert ran == pipe.schedule.programs[dist.get_rank()]
        pipe.close()
    return wrong


def any_shape(
    ranks: int, schedules: Sequence[ScheduleLike], shapes: Any, layers: int, turn: int | None = None
) -> list[str]:
    """Ragged microbatches, packed documents, and checkpointed layers in each schedule; what went wrong.

    turn: take one of the three for each schedule, beginning at this one; None for all
    """
    model, rows = tiny_model("llama", layers=layers, tied=True), documents(8)
    cases: list[tuple[str, Microbatches, Microbatches, bool | Checkpointing]]
    cases = [("ragged", ragged(8), ragged(8), False), ("packed", packed(rows), apart(rows), False),
             ("checkpointed", ragged(8, 1), ragged(8, 1), Checkpointing(in_flight=2))]  # fmt: skip
    plain = {name: plain_steps(model, alone) for name, _, alone, _ in cases}
    wrong: list[str] = []
    runs = list(product(schedules, cases))
    if turn is not None:
        runs = [(schedule, cases[(turn + place) % 3]) for place, schedule in enumerate(schedules)]
    for schedule, (name, microbatches, _, checkpointing) in runs:
        loss, expected = plain[name]
        pipe = AutoPipeline(
            ranks=ranks, schedule=schedule, microbatches=8, timeout=30, shapes=shapes,
            activation_checkpointing=checkpointing,
        ).build(model)  # fmt: skip
        with noting(wrong, f"{name} P={ranks} {schedule}"):
            for _ in range(2):
                pipe.zero_grad()
                assert abs(pipe.step(microbatches).loss - loss) < 1e-5
            assert_every_gradient(pipe.modules.values(), expected, TOLERANCE[torch.float32])
        pipe.close()
    return wrong


def shapes(ranks: int) -> list[str]:
    """Steps and an evaluation of different shapes one after the other; what went wrong on this rank."""
    model = tiny_model("llama")
    pipe = AutoPipeline(ranks=ranks, microbatches=4, timeout=30).build(model)
    wrong: list[str] = []
    for rows, length in ((8, 10), (5, 7), (9, 16), (8, 10)):
        batch = ragged_batch(rows, length)
        loss, expected = plain_step(model, batch)
        pipe.zero_grad()
        with noting(wrong, f"{rows} rows of {length}"):
            assert abs(pipe.step(batch).loss - loss) < 1e-5
            gradients = gradients_of(pipe)
            assert abs(pipe.evaluate(ragged_batch(3, length)).loss) > 0
            assert_gradients(gradients, expected, TOLERANCE[torch.float32])
    return wrong


def results(family: str, ranks: int, microbatches: int, **options: Any) -> Any:
    """Loss, norm and evaluation as this rank sees them."""
    pipe = AutoPipeline(ranks=ranks, microbatches=microbatches, timeout=30, **options).build(
        tiny_model(family)
    )
    before = pipe.evaluate(ragged_batch())
    result = pipe.step(ragged_batch())
    norm = pipe.clip_grad_norm_(0.5)
    return before.loss, result.loss, result.tokens, result.bubble, norm, pipe.clip_grad_norm_(0.5)


def errors(action: str) -> str:
    """The typed error that `action` ends in on this rank, in words."""
    rank = dist.get_rank()
    try:
        if action == "world":
            AutoPipeline(ranks=3, microbatches=2, timeout=20).build(tiny_config("llama"))
        elif action == "mesh":
            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
            AutoPipeline(ranks=4, microbatches=2, timeout=20, mesh=mesh).build(tiny_config("llama"))
        elif action == "order":
            mesh = DeviceMesh("cpu", [1, 0], mesh_dim_names=("pp",))
            AutoPipeline(ranks=2, microbatches=2, timeout=20, mesh=mesh).build(tiny_config("llama"))
        elif action == "axis":
            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
            AutoPipeline(ranks=2, microbatches=2, timeout=20, mesh=mesh).build(tiny_config("llama"))
        else:
            pipe = AutoPipeline(ranks=2, microbatches=2, timeout=20).build(tiny_config("llama"))
            pipe.step(ragged_batch())
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


def two_pipelines(dp: int, sliced: bool) -> list[Any]:
    """A mesh of `dp` pipelines of two ranks: each gives the numbers of a plain process on its own batch.

    sliced: whether a pipeline is given its own part of the mesh
    """
    mesh = init_device_mesh("cpu", (dp, 2), mesh_dim_names=("dp_replicate", "pp"))
    model = tiny_model("llama", tied=True)
    given = mesh["pp"] if sliced else mesh
    pipe = AutoPipeline(ranks=2, microbatches=3, mesh=given, timeout=30).build(model)
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


def group_per_channel(ranks: int) -> list[str]:
    """The channels as NCCL gets them, which has no tags, over gloo."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(channels, "has_tags", lambda groups: False)
        return equivalence("qwen3", True, ranks, [("1f1b", 5), ("gpipe", 2)])


def replicas() -> Any:
    """Values and gradients by stage, loss and norm, of a schedule that keeps two copies of the model."""
    from runtime.test_shared_weights import Part, batch, mean_square, schedule

    torch.manual_seed(dist.get_rank())
    pipe = Pipeline.from_provider(Part, schedule=schedule(), loss_fn=mean_square, timeout=30)
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
    assert_gradients(gradients_of(pipe), expected, TOLERANCE[torch.float32])
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
