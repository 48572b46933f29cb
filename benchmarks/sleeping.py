"""Stages that sleep in place of computing, for penstock, for torch, and without a library; and their steps.

Every stage sleeps 20 ms in its forward, 20 for the input's gradient and 20 for the weight's. The input of
every stage has a gradient, the first one's too, as behind an embedding, so that both libraries do the same
work. Each rank counts its sleeps: `step` fails where a count is not that of the schedule's ops.
"""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from benchmarks.pool import Pool, Rank
from benchmarks.rivals import Work, ours, theirs, torch_programs
from penstock.runtime.split_backward.products import CALLS, ProductForm
from penstock.schedule import Costs, Op, Schedule, Timeline, simulate

RANKS, MICROBATCHES, SECONDS = 4, 16, 0.02
HIDDEN = (1, 128, 256)  # rows, sequence, width: 128 KiB a message
LOOP = "no library"
PR_SET_TIMERSLACK = 29
SLEEPS = {"F": 1, "B": 2, "I": 1, "W": 1}  # in an op


@dataclass
class Slept:
    """The sleeps of this process: how many, and how long they took in all."""

    count: int = 0
    seconds: float = 0.0


SLEPT = Slept()


def sleep() -> None:
    start = time.perf_counter()
    time.sleep(SECONDS)
    SLEPT.count += 1
    SLEPT.seconds += time.perf_counter() - start


def wake_at_once(_: Rank) -> None:
    """The kernel may end a sleep 50 µs late, unless it is told that 1 ns is the limit."""
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1)


class Sleep(torch.autograd.Function):
    """Touches no value: what it takes beyond the sleep would count as the library's."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        return slept(hidden, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return slow_input_gradient(gradients[0]), slow_weight_gradient()


def slept(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not hidden.is_meta:  # while shapes are learnt
        sleep()
    return hidden.view_as(hidden)


def slow_input_gradient(dy: Tensor, weight: Tensor | None = None) -> Tensor:
    sleep()
    return dy


def slow_weight_gradient(x: Tensor | None = None, dy: Tensor | None = None) -> Tensor:
    sleep()
    return torch.zeros(())


def product(hidden: Tensor, weight: Tensor) -> Tensor:
    """As one of torch's products, which penstock knows how to split."""
    if has_torch_function((hidden, weight)):
        made: Tensor = handle_torch_function(product, (hidden, weight), hidden, weight)
        return made
    whole: Tensor = Sleep.apply(hidden, weight)  # type: ignore[no-untyped-call]
    return whole


def _find(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, None, ProductForm]:
    return hidden, weight, None, ProductForm(slept, slow_input_gradient, slow_weight_gradient)


class Embed(torch.autograd.Function):
    """Gives the batch a gradient: of `table`, as an embedding's."""

    @staticmethod
    def forward(ctx: Any, batch: Tensor, table: Tensor) -> Tensor:
        return batch.view_as(batch)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        return None, torch.zeros(())


class Sleeper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.table = (nn.Parameter(torch.ones(())) for _ in range(2))

    def hidden(self, x: Tensor) -> Tensor:
        """The stage's input, which has a gradient on every stage."""
        if x.requires_grad:
            return x
        embedded: Tensor = Embed.apply(x, self.table)  # type: ignore[no-untyped-call]
        return embedded

    def forward(self, x: Tensor) -> Tensor:
        return product(self.hidden(x), self.weight)


class SleepInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return slept(hidden, hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return slow_input_gradient(gradients[0])


class SleepWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return slow_weight_gradient()


class Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        return torch.empty_like(hidden)  # no view: torch detaches a stage's output in place

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], torch.zeros(())


class TorchSleeper(Sleeper):
    """The same, with the weight on a branch of its own: torch splits a backward along the graph."""

    def forward(self, x: Tensor) -> Tensor:
        weight = SleepWeight.apply(self.weight)  # type: ignore[no-untyped-call]
        result: Tensor = Attach.apply(SleepInput.apply(self.hidden(x)), weight)  # type: ignore[no-untyped-call]
        return result


def first(output: Tensor, target: Tensor) -> Tensor:
    return output[0, 0, 0].clone()  # no view, as above


def emulated(module: type[Sleeper] = Sleeper) -> Work:
    """Stages of `module`, whose products penstock is taught to split."""
    torch.manual_seed(0)
    cast(dict[object, object], CALLS)[product] = ("hidden", "weight"), _find
    shape = (HIDDEN[0] * MICROBATCHES, *HIDDEN[1:])
    return Work(module, first, torch.randn(shape), torch.randn(shape), MICROBATCHES)


def prepare(rank: Rank, library: str, schedule: str, program: Schedule) -> list[list[str]] | None:
    """Make one pipeline, the only one of its process, and run it once; torch's order where it differs."""
    work, order = emulated(Sleeper if library == "penstock" else TorchSleeper), None
    if library == "penstock":
        rank.kept["pipe", schedule], rank.kept[schedule] = ours(work, program, rank.count, transport="gloo")
    else:
        made = theirs(work, schedule, rank.index, rank.count)
        rank.kept[schedule], order = made.step, torch_programs(schedule, made.runner)
    rank.kept[schedule]()  # the first step makes what later ones reuse
    return order


def prepare_loop(rank: Rank, schedule: str, program: Schedule) -> None:
    """The same sleeps and messages without a library: the limit of the machine."""
    rank_of = program.placement.rank_of
    numbers: dict[tuple[Op, Op], int] = {}
    for ops in program.programs:
        for op in ops:
            for other in program.predecessors(op):
                if rank_of[other.stage] != rank_of[op.stage]:
                    numbers[other, op] = len(numbers)
    mine = program.programs[rank.index]
    inputs = {taker: (rank_of[op.stage], tag) for (op, taker), tag in numbers.items() if taker in mine}
    outputs = {op: (rank_of[taker.stage], tag) for (op, taker), tag in numbers.items() if op in mine}
    message = torch.zeros(HIDDEN)

    def loop() -> None:
        posted = {
            op: dist.irecv(torch.empty_like(message), source, tag=tag) for op, (source, tag) in inputs.items()
        }
        sent = []
        for op in mine:
            if (work := posted.get(op)) is not None:
                work.wait()
            for _ in range(SLEEPS[op.kind]):
                sleep()
            if op in outputs:
                target, tag = outputs[op]
                sent.append(dist.isend(message, target, tag=tag))
        for leaving in sent:
            if leaving is not None:
                leaving.wait()

    rank.kept[LOOP, schedule] = loop
    loop()


def finish(rank: Rank, schedule: str) -> None:
    """Its threads would cost the next one time."""
    del rank.kept[schedule]
    rank.kept.pop((LOOP, schedule), None)
    if (pipe := rank.kept.pop(("pipe", schedule), None)) is not None:
        pipe.close()


class Timed(NamedTuple):
    """One step on one rank. sleeps, slept: how many, and their seconds; timeline: penstock's"""

    start: float
    end: float
    sleeps: int
    slept: float
    timeline: Timeline | None


class Step(NamedTuple):
    """One step over all ranks. sleep: seconds of one, on the average, by rank"""

    wall: float
    sleep: list[float]
    timeline: Timeline | None


def timed(rank: Rank, schedule: str | tuple[str, str]) -> Timed:
    """One step of this rank."""
    dist.barrier()
    count, seconds = SLEPT.count, SLEPT.seconds
    start = time.perf_counter()
    rank.kept[schedule]()
    end = time.perf_counter()
    pipe = rank.kept.get(("pipe", schedule))
    timeline = None if pipe is None else pipe.timeline
    return Timed(start, end, SLEPT.count - count, SLEPT.seconds - seconds, timeline)


def step(pool: Pool, schedule: str | tuple[str, str], program: Schedule) -> Step:
    """One step of all ranks. Raises RuntimeError where a rank did other work than the schedule has."""
    ranks: list[Timed] = pool.run(timed, schedule)
    counts = [rank.sleeps for rank in ranks]
    asked = [sum(SLEEPS[op.kind] for op in ops) for ops in program.programs]
    if counts != asked:
        raise RuntimeError(f"{schedule}: the ranks slept {counts} times; F, I and W of each stage: {asked}")
    wall = max(rank.end for rank in ranks) - min(rank.start for rank in ranks)
    return Step(wall, [rank.slept / rank.sleeps for rank in ranks], ranks[0].timeline)


def stamps(rank: Rank, rounds: int, pause: float) -> list[float]:
    """Rank 0 sends to rank 1 every `pause` seconds; when each send was started, and when it was there."""
    message, times = torch.zeros(HIDDEN), []
    for _ in range(rounds):
        if rank.index == 0:
            time.sleep(pause)
            times.append(time.perf_counter())
            work = dist.isend(message, 1)
        elif rank.index == 1:
            work = dist.irecv(message, 0)
        else:
            time.sleep(pause)  # as the other ranks of a step would
            continue
        assert work is not None
        work.wait()
        if rank.index == 1:
            times.append(time.perf_counter())
    dist.barrier()
    return times


def latency(pool: Pool, pause: float) -> float:
    """One-way latency of a message where the ends do something else for `pause` seconds in between."""
    sent, arrived, *_ = pool.run(stamps, 40, pause)
    found: float = median(there - here for here, there in zip(sent, arrived, strict=True))
    return found


def predicted(
    program: Schedule, communication: float, sleeps: list[float] | None = None, of_torch: bool = False
) -> float:
    """sleeps: how long each takes, by rank; of_torch: the first stage's I is empty, and its W does both"""
    sleeps = sleeps or [SECONDS] * RANKS
    each = [sleeps[rank] for rank in program.placement.rank_of]
    costs = Costs(forward=each, input_grad=each, weight_grad=each, communication=communication)
    if of_torch:
        costs = replace(costs, input_grad=[0.0, *each[1:]], weight_grad=[2 * each[0], *each[1:]])
    return simulate(program, costs).makespan
