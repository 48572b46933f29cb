"""Overlapped pairs in two threads: the plan, what it computes, what it holds, and when it does not."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from penstock import Axes, Pipeline, Sharded
from penstock.batch.shapes import Microbatch
from penstock.errors import ConfigError
from penstock.models.stage import StageInfo
from penstock.pipeline.options import Options
from penstock.runtime.plan import Begin, Compute, Deliver, End, Free, Message, Post, Send, Wait, lower
from penstock.schedule import Schedule, build, verify

PAIRED: dict[str, Any] = {"schedule": "1f1b", "paired": True}
MESSAGE = 2 * 3 * 8  # bytes: rows of a microbatch, width, float64
SCHEDULES = ("dualpipe_v", "dualpipe", PAIRED, {**PAIRED, "zero_bubble": True})


class Chunk(nn.Module):
    """One linear layer; the first stage reads `x`."""

    dropout = 0.0

    def __init__(self, info: StageInfo) -> None:
        super().__init__()
        torch.manual_seed(info.stage)
        self.linear = nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = torch.tanh(self.linear(x))
        return nn.functional.dropout(hidden, self.dropout) if self.dropout else hidden


class Threads(torch.autograd.Function):
    """Notes the thread of each backward."""

    seen: ClassVar[set[str]] = set()

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        Threads.seen.add(threading.current_thread().name)
        return gradients[0]


def squares(output: Tensor, microbatch: Microbatch) -> Tensor:
    difference: Tensor = output - microbatch["y"]
    return difference.square().sum() / output.shape[0]


def batch(rows: int = 16) -> dict[str, Tensor]:
    x = torch.randn(rows, 3, generator=torch.Generator().manual_seed(rows), dtype=torch.float64)
    return {"x": x, "y": x.flip(0)}


def made(schedule: Any, provider: Any = Chunk, **options: Any) -> Pipeline:
    return Pipeline.from_provider(
        provider, schedule=schedule, ranks=2, microbatches=8, loss_fn=squares, **{"overlap": True, **options}
    )


def ran(pipe: Pipeline) -> int:
    """Pairs that ran side by side so far."""
    return sum(executor.overlapped for executor in pipe._training.executors)


def text(schedule: Schedule, rank: int) -> str:
    words = []
    for action in lower(verify(schedule), rank, overlap=True).actions:
        match action:
            case Compute(op):
                words.append(str(op))
            case Begin(compute) | End(compute):
                words.append(f"{type(action).__name__.lower()} {compute.op}")
            case Post(message) | Wait(message) | Send(message) | Free(message) | Deliver(message):
                words.append(f"{type(action).__name__.lower()} {message.op}")
    return " ".join(words)


def test_golden() -> None:
    schedule = build("1f1b", ranks=2, microbatches=4, paired=True)
    first = text(schedule, 0)
    assert first.endswith(
        "wait 1B0 free 0F0 free 0F1 begin 0B0 0F3 send 0F3 end 0B0 post 1B2 wait 1B1 free 0F2 0B1 "
        "post 1B3 wait 1B2 free 0F3 0B2 wait 1B3 0B3"
    ), first
    second = text(schedule, 1)
    assert "begin 1B0 1F1 end 1B0 send 1B0" in second, second


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("microbatches", [2, 6, 12])
@pytest.mark.parametrize("name", ["dualpipe", "dualpipe_v", "1f1b"])
def test_nothing_is_waited_for_within_a_pair(name: str, ranks: int, microbatches: int) -> None:
    options = {"paired": True} if name == "1f1b" else {}
    schedule = build(name, ranks=ranks, microbatches=microbatches, **options)
    for rank in range(ranks):
        plan = lower(verify(schedule), rank)
        actions, open_ = lower(verify(schedule), rank, overlap=True).actions, None
        sent: set[Message] = set()
        for action in actions:
            match action:
                case Begin(compute):
                    assert open_ is None
                    open_ = compute
                case End(compute):
                    assert compute == open_
                    open_ = None
                case Wait() | Post() | Free() as waits:
                    assert open_ is None
                    assert not isinstance(waits, Free) or waits.message in sent
                case Send(message):
                    sent.add(message)
                case _:
                    pass
        kept = [action for action in actions if not isinstance(action, Begin | End)]
        begun = [action.backward for action in actions if isinstance(action, Begin)]
        assert sorted(map(repr, (*kept, *begun))) == sorted(map(repr, plan.actions))
        assert len(begun) == sum(pair.forward in schedule.programs[rank] for pair in schedule.overlaps)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_as_one_after_the_other(schedule: Any, checkpointing: bool) -> None:
    pipe = made(schedule, activation_checkpointing=checkpointing)
    plain = made(schedule, activation_checkpointing=checkpointing, overlap=False)
    for _ in range(3):
        assert pipe.step(batch()).loss == plain.step(batch()).loss
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
    class Noting(Chunk):
        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = Threads.apply(super().forward(x))  # type: ignore[no-untyped-call]
            return result

    pipe = made(PAIRED, Noting)
    pipe.step(batch())
    Threads.seen.clear()
    pipe.step(batch())
    main = threading.current_thread().name
    assert main in Threads.seen  # the drain's
    assert any(name.startswith("penstock-backward") for name in Threads.seen)
    pipe.close()
    assert not [thread for thread in threading.enumerate() if "penstock-backward" in thread.name]


def test_a_model_that_draws_random_numbers_runs_one_after_the_other() -> None:
    class Dropping(Chunk):
        dropout = 0.5

    pipe = made(PAIRED, Dropping, activation_checkpointing=True)
    for _ in range(3):
        pipe.step(batch())
    assert ran(pipe) == 0
    pipe.close()


def test_ops_that_someone_watches_run_one_after_the_other() -> None:
    class Watching(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    pipe = made(PAIRED)
    pipe.step(batch())
    before = ran(pipe)
    with Watching():
        pipe.step(batch())
    assert ran(pipe) == before
    pipe.step(batch())
    assert ran(pipe) > before
    pipe.close()


@pytest.mark.parametrize("kind", ["F", "B"])
def test_an_error_in_a_pair_names_its_op_and_leaves_no_thread(kind: str) -> None:
    pipes: list[Pipeline] = []
    armed = [False]

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, hidden: Tensor) -> Tensor:
            return hidden.view_as(hidden)

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            beside = threading.current_thread().name.startswith("penstock-backward")
            if armed[0] and kind == "B" and beside:
                raise ValueError("broken on purpose")
            return gradients[0]

    class Broken(Chunk):
        def forward(self, x: Tensor) -> Tensor:
            threads = [executor.overlap_thread for pipe in pipes for executor in pipe._training.executors]
            if armed[0] and kind == "F" and any(thread is not None and thread.busy for thread in threads):
                raise ValueError("broken on purpose")
            result: Tensor = Failing.apply(super().forward(x))  # type: ignore[no-untyped-call]
            return result

    pipe = made("dualpipe_v", Broken)
    pipes.append(pipe)
    pipe.step(batch())
    armed[0] = True
    with pytest.raises(ValueError, match="broken on purpose") as error:
        pipe.step(batch())
    doing = error.value.__notes__[0].split(" in ")[1]
    assert kind in doing.split(",")[0], doing
    assert not [thread for thread in threading.enumerate() if "penstock-backward" in thread.name]
    armed[0] = False
    pipe.zero_grad()
    before = pipe.step(batch()).loss
    assert pipe.step(batch()).loss == before
    assert ran(pipe) > 0
    pipe.close()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"schedule": "1f1b"}, "it marks no pairs"),
        ({"schedule": PAIRED, "exchange": "batched"}, "exchange='batched'"),
        ({"schedule": PAIRED, "axes": Axes(tp=2)}, "over one process group"),
        ({"schedule": PAIRED, "axes": Axes(cp=2)}, "over one process group"),
        ({"schedule": PAIRED, "sharded": Sharded(reshard_after_forward=True)}, "weights are gathered"),
    ],
)
def test_what_cannot_run_side_by_side_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Options(ranks=2, microbatches=8, overlap=True, **options).chosen_schedule()
    Options(ranks=2, microbatches=8, overlap="auto", **options).chosen_schedule()


def test_by_default_pairs_run_side_by_side_where_experts_are_spread() -> None:
    assert not Options().world_options().overlap
    assert not Options(axes=Axes(dp_shard=2)).world_options().overlap
    assert Options(axes=Axes(dp_shard=2, ep=2)).world_options().overlap
    assert Options(axes=Axes(dp_shard=2, ep=-1)).world_options().overlap
    assert not Options(axes=Axes(dp_shard=2, ep=2), overlap=False).world_options().overlap
    assert not Options(axes=Axes(dp_shard=2, ep=2, tp=2)).world_options().overlap
    with pytest.raises(ConfigError, match="overlap='yes'"):
        Options(overlap="yes").world_options()  # type: ignore[arg-type]
