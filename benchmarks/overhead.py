"""What the library itself takes per op, where computing takes next to nothing.

A stage multiplies four numbers by a parameter. What the same forwards and backwards take in a plain loop is
subtracted; the rest, divided by the ops (F or B), is the cost of the library. In process that is time of
the processor, so that other programs on the machine do not count.

- P=4 in process: no message leaves the process. penstock runs all four ranks in one process with its
  in-process transport; torch, which has none, runs one rank after the other on its own fake process group,
  whose sends and receives do nothing. The sum over the four ranks counts. The bar is on this one.
- P=1: one stage, so that neither library sends anything at all.
- P=2 over gloo: all of it, messages too, on two processes. For information: nothing is subtracted, and ranks
  wait for each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.pool import Pool, Rank
from benchmarks.report import Found, Row
from benchmarks.rivals import SCHEDULES, Work, ours, theirs

RANKS, MICROBATCHES, WIDTH = 4, 64, 4
BAR = 1 / 3
ROUNDS = 15  # of each of the things compared, in turn, in one repeat


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def total(output: Tensor, target: Tensor) -> Tensor:
    return output.sum()


def work() -> Work:
    batch = torch.ones(MICROBATCHES, WIDTH)
    return Work(Scale, total, batch, batch, MICROBATCHES)


def bare(rank: int, ranks: int) -> Callable[[], object]:
    """The forwards and backwards of one rank in a plain loop."""
    module, gradient = Scale(), torch.ones(1, WIDTH)
    rows = torch.ones(MICROBATCHES, WIDTH).tensor_split(MICROBATCHES)
    inputs = [row.clone().requires_grad_(rank > 0) for row in rows]

    def loop() -> None:
        for x in inputs:
            x.grad = None
            output = module(x)
            if rank == ranks - 1:
                (total(output, x) / MICROBATCHES).backward()  # type: ignore[no-untyped-call]
            else:
                output.backward(gradient)

    return loop


def in_turn(steps: Sequence[Callable[[], object]], rounds: int, clock: Callable[[], float]) -> list[float]:
    """The median time of each of `steps` on `clock`, run in turn."""
    times: list[list[float]] = [[] for _ in steps]
    for number in range(rounds + 3):
        for step, taken in zip(steps, times, strict=True):
            start = clock()
            step()
            if number >= 3:  # the first ones warm up
                taken.append(clock() - start)
    return [median(taken) for taken in times]


def in_process(_: Rank, schedule: str, ranks: int) -> tuple[float, float]:
    """Cost per op in seconds, of penstock and of torch. Runs in a process that has no process group yet."""
    mine = ours(work(), schedule, ranks)[1]
    spent, other = [], 0.0
    for rank in range(ranks):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        (stage,), _, step = theirs(work(), schedule, rank, ranks)
        # the ranks' vote on how shapes are learnt, which the fake group does not deliver
        stage._warmup_backward_result = _static  # type: ignore[method-assign]
        loops = [bare(r, ranks) for r in range(ranks)]
        step_all, step_one, *plain = in_turn([mine, step, *loops], ROUNDS, time.thread_time)
        dist.destroy_process_group()
        spent.append(step_all - sum(plain))
        other += step_one - plain[rank]
    ops = ranks * MICROBATCHES * 2
    return median(spent) / ops, other / ops


def _static(received_result: Any = None) -> Tensor:
    return torch.ones(1, dtype=torch.int32)


def prepare(rank: Rank) -> None:
    for schedule in SCHEDULES:
        rank.kept["penstock", schedule] = ours(work(), schedule, rank.count)[1]
        rank.kept["torch", schedule] = theirs(work(), schedule, rank.index, rank.count).step


def over_gloo(rank: Rank, schedule: str) -> list[float]:
    """Time per op in seconds, of penstock and of torch."""
    steps = [rank.kept["penstock", schedule], rank.kept["torch", schedule]]
    return [taken / (MICROBATCHES * 2) for taken in in_turn(steps, ROUNDS, time.perf_counter)]


def measure(repeats: int) -> Found:
    raw: dict[str, list[Any]] = {}
    with Pool(1, join=False) as pool:
        for _ in range(repeats):
            for schedule in SCHEDULES:
                for ranks in (RANKS, 1):
                    case = f"{schedule}, P={ranks} in process"
                    raw.setdefault(case, []).append(pool.run(in_process, schedule, ranks)[0])
    with Pool(2) as pool:
        pool.run(prepare)
        for _ in range(repeats):
            for schedule in SCHEDULES:
                slowest = [max(times) for times in zip(*pool.run(over_gloo, schedule), strict=True)]
                raw.setdefault(f"{schedule}, P=2 over gloo", []).append(slowest)
    rows = []
    for case, costs in raw.items():
        mine, other = (median(column) for column in zip(*costs, strict=True))
        judged = f"P={RANKS} in process" in case
        rows.append(Row(
            case, "time per op" if "gloo" in case else "cost per op", mine * 1e6, "µs", other * 1e6,
            "below a third of torch's" if judged else "", mine < BAR * other if judged else None,
        ))  # fmt: skip
    notes = [
        f"m={MICROBATCHES}; cost: the step less the same forwards and backwards in a plain loop, per F or B",
        "P=4 in process: penstock's in-process transport with all ranks, beside the sum of torch's four "
        "ranks on its fake process group (sends and receives do nothing)",
        "P=1: one stage, no message; P=2 over gloo: whole step per op of one rank, with messages and waiting",
    ]
    return Found("overhead", "Cost of the runtime per op, empty compute", rows, notes, raw)
