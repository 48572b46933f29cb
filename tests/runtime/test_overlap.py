"""Overlapped pairs in two threads: what they compute, what they hold, and when they run in sequence."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from penstock import Axes, Pipeline, Sharded
from penstock.errors import ConfigError
from penstock.pipeline.options import Options
from runtime.test_executor import Chunk, batch, squares

PAIRED: dict[str, Any] = {"schedule": "1f1b", "paired": True}
MESSAGE = 2 * 3 * 8  # bytes: rows of a microbatch, width, float64
SCHEDULES = ("dualpipe_v", "dualpipe", PAIRED, {**PAIRED, "zero_bubble": True})


BATCH = batch(16)
THREAD = "penstock-backward"


class InBackward(torch.autograd.Function):
    """Calls `then` in the backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, then: Callable[[], object]) -> Tensor:
        ctx.then = then
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.then()
        return gradients[0], None


def thread() -> str:
    return threading.current_thread().name


def no_thread_is_left() -> bool:
    return not [each for each in threading.enumerate() if THREAD in each.name]


def made(schedule: Any, provider: Any = Chunk, **options: Any) -> Pipeline:
    return Pipeline.from_provider(
        provider, schedule=schedule, ranks=2, microbatches=8, loss_fn=squares, **{"overlap": True, **options}
    )


def ran(pipe: Pipeline) -> int:
    """Pairs that have run in two threads so far."""
    return sum(executor.overlapped for executor in pipe._training.executors)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_numbers_are_those_of_ops_in_sequence(schedule: Any, checkpointing: bool) -> None:
    pipe = made(schedule, activation_checkpointing=checkpointing)
    plain = made(schedule, activation_checkpointing=checkpointing, overlap=False)
    for _ in range(3):
        assert pipe.step(BATCH).loss == plain.step(BATCH).loss
        assert pipe.timeline.peak_live == pipe.proof.peak_live
        more = [a.total - b.total for a, b in zip(pipe.memory, plain.memory, strict=True)]
        assert all(0 <= size <= MESSAGE for size in more)  # both inputs of a pair are there at once
    for parameter, other in zip(pipe.parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad)  # type: ignore[arg-type]
    of_a_step = len(pipe.schedule.overlaps)
    assert 2 * of_a_step <= ran(pipe) <= 3 * of_a_step
    assert ran(plain) == 0
    order = [[span.op for span in pipe.timeline.of_rank(rank)] for rank in range(2)]
    assert order == [list(program) for program in pipe.schedule.programs]
    pipe.close()


def test_backwards_run_in_a_thread_that_ends_with_the_pipeline() -> None:
    seen = set[str]()

    class Noting(Chunk):
        def forward(self, x: Tensor) -> Tensor:
            hidden: Tensor = InBackward.apply(super().forward(x), lambda: seen.add(thread()))  # type: ignore[no-untyped-call]
            return hidden

    pipe = made(PAIRED, Noting)
    pipe.step(BATCH)
    seen.clear()
    pipe.step(BATCH)
    assert thread() in seen  # the drain's
    assert any(name.startswith(THREAD) for name in seen)
    pipe.close()
    assert no_thread_is_left()


def test_a_model_that_draws_random_numbers_runs_one_after_the_other() -> None:
    class Dropping(Chunk):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(super().forward(x), 0.5)

    pipe = made(PAIRED, Dropping, activation_checkpointing=True)
    for _ in range(3):
        pipe.step(BATCH)
    assert ran(pipe) == 0
    pipe.close()


def test_ops_that_someone_watches_run_one_after_the_other() -> None:
    class Watching(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    pipe = made(PAIRED)
    pipe.step(BATCH)
    before = ran(pipe)
    with Watching():
        pipe.step(BATCH)
    assert ran(pipe) == before
    pipe.step(BATCH)
    assert ran(pipe) > before
    pipe.close()


@pytest.mark.parametrize("kind", ["F", "B"])
def test_an_error_in_a_pair_names_its_op_and_leaves_no_thread(kind: str) -> None:
    pipes: list[Pipeline] = []
    armed = [False]

    def fail_in_pair() -> None:
        if armed[0] and kind == "B" and thread().startswith(THREAD):
            raise ValueError("broken on purpose")

    class Broken(Chunk):
        def forward(self, x: Tensor) -> Tensor:
            threads = [executor.overlap_thread for pipe in pipes for executor in pipe._training.executors]
            if armed[0] and kind == "F" and any(thread is not None and thread.busy for thread in threads):
                raise ValueError("broken on purpose")
            hidden: Tensor = InBackward.apply(super().forward(x), fail_in_pair)  # type: ignore[no-untyped-call]
            return hidden

    pipe = made("dualpipe_v", Broken)
    pipes.append(pipe)
    pipe.step(BATCH)
    armed[0] = True
    with pytest.raises(ValueError, match="broken on purpose") as error:
        pipe.step(BATCH)
    doing = error.value.__notes__[0].split(" in ")[1]
    assert kind in doing.split(",")[0], doing
    assert no_thread_is_left()
    armed[0] = False
    pipe.zero_grad()
    before = pipe.step(BATCH).loss
    assert pipe.step(BATCH).loss == before
    assert ran(pipe) > 0
    pipe.close()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"schedule": "1f1b"}, "it marks no pairs"),
        ({"schedule": PAIRED, "device": "cuda:1"}, r"a GPU.*docs/parallel\.md"),
        ({"schedule": PAIRED, "exchange": "batched"}, "exchange='batched'"),
        ({"schedule": PAIRED, "axes": Axes(tp=2)}, "over one process group"),
        ({"schedule": PAIRED, "axes": Axes(cp=2)}, "over one process group"),
        (
            {"schedule": PAIRED, "axes": Axes(dp_shard=2), "sharded": Sharded(reshard_after_forward=True)},
            "weights are gathered",
        ),
    ],
)
def test_what_cannot_run_in_two_threads_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Options(ranks=2, microbatches=8, overlap=True, **options).chosen_schedule()
    Options(ranks=2, microbatches=8, overlap="auto", **options).chosen_schedule()


def test_pairs_are_refused_where_the_device_is_a_gpu_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, found in (("is_available", True), ("device_count", 1)):
        monkeypatch.setattr(torch.cuda, name, lambda found=found: found)
    with pytest.raises(ConfigError, match="overlap=True with a GPU"):
        Options(overlap=True).world_options()
    assert not Options(axes=Axes(dp_shard=2, ep=2)).world_options().overlap
    assert Options(overlap=True, device="cpu").world_options().overlap


def test_by_default_pairs_run_in_two_threads_where_experts_are_spread() -> None:
    sharded, experts = {"dp_shard": 2}, {"dp_shard": 2, "ep": 2}
    assert [Options(axes=Axes(**sizes)).world_options().overlap
            for sizes in ({}, sharded, experts, {"dp_shard": 2, "ep": -1}, {**experts, "tp": 2})
            ] == [False, False, True, True, False]  # fmt: skip
    assert not Options(axes=Axes(**experts), overlap=False).world_options().overlap
    with pytest.raises(ConfigError, match="overlap='yes'"):
        Options(overlap="yes").world_options()  # type: ignore[arg-type]
