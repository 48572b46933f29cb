"""What the library itself takes per op, where computing takes next to nothing.

A stage multiplies four numbers by a parameter. The ops are F and B.

- In process, no message: neither library moves one. penstock runs all ranks in one process and hands tensors
  over; torch, which has no such transport, runs one rank after the other on its fake process group, and its
  calls of sends and receives are left out. What the same forwards and backwards take in a plain loop is
  subtracted. The time is the processor's, so that other programs on the machine do not count, and torch's is
  the sum over the ranks. The bar is on this one. It grows with m and with P as the table says.
- Two processes: the whole step, messages and waiting too. Both libraries over gloo, and penstock over shared
  memory, which it takes for ranks of one host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import schedules
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.pool import Pool, Rank
from benchmarks.report import Found, Row, measured
from benchmarks.rivals import SCHEDULES, Work, ours, theirs
from benchmarks.rounds import Numbers, rounds_of, summary

RANKS, MICROBATCHES, WIDTH = 4, 64, 4
BAR = 0.333
CPU = torch.device("cpu")
STEPS = 15  # of each of the things compared, in turn, in one round
# schedule, ranks, microbatches
CASES = (
    *((schedule, RANKS, MICROBATCHES) for schedule in SCHEDULES),
    *(("1f1b", RANKS, count) for count in (8, 16, 32)),
    *(("1f1b", ranks, MICROBATCHES) for ranks in (1, 2, 8)),
)
PROCESSES = 2
GLOO, SHARED, TORCH = "penstock over gloo", "penstock over shared memory", "torch over gloo"


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def total(output: Tensor, target: Tensor) -> Tensor:
    return output.sum()


def work(microbatches: int, device: torch.device = CPU) -> Work:
    batch = torch.ones(microbatches, WIDTH, device=device)
    return Work(Scale, total, batch, batch, microbatches)


def bare(rank: int, ranks: int, microbatches: int, device: torch.device = CPU) -> Callable[[], object]:
    """The forwards and backwards of one rank in a plain loop."""
    module, gradient = Scale().to(device), torch.ones(1, WIDTH, device=device)
    rows = torch.ones(microbatches, WIDTH, device=device).tensor_split(microbatches)
    inputs = [row.clone().requires_grad_(rank > 0) for row in rows]

    def loop() -> None:
        for x in inputs:
            x.grad = None
            output = module(x)
            if rank == ranks - 1:
                (total(output, x) / microbatches).backward()  # type: ignore[no-untyped-call]
            else:
                output.backward(gradient)

    return loop


def medians(steps: Sequence[Callable[[], object]], clock: Callable[[], float]) -> list[float]:
    """The median time of each of `steps` on `clock`, run in turn."""
    times: list[list[float]] = [[] for _ in steps]
    for number in range(STEPS + 3):
        for step, taken in zip(steps, times, strict=True):
            start = clock()
            step()
            if number >= 3:  # the first ones warm up
                taken.append(clock() - start)
    return [median(taken) for taken in times]


def in_process(_: Rank, schedule: str, ranks: int, microbatches: int) -> Numbers:
    """In a process of the pool: see `cost_per_op`."""
    return cost_per_op(schedule, ranks, microbatches)


def cost_per_op(schedule: str, ranks: int, microbatches: int, device: torch.device = CPU) -> Numbers:
    """Cost per op in seconds, by library. Runs in a process that has no process group yet.

    On a GPU the time is the wall's: threads of autograd take a part of it, and what they queue is next to no
    work.
    """
    one = work(microbatches, device)
    clock = time.thread_time if device.type == "cpu" else _until_done
    pipe, mine = ours(one, schedule, ranks)
    spent, other = [], 0.0
    for rank in range(ranks):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        (stage,), _, step = theirs(one, schedule, rank, ranks)
        # the ranks' vote on how shapes are learnt, which the fake group does not deliver
        stage._warmup_backward_result = _static  # type: ignore[method-assign]
        loops = [bare(r, ranks, microbatches, device) for r in range(ranks)]
        with patch.object(schedules, "_batch_p2p", _no_calls):
            step_all, step_one, *plain = medians([mine, step, *loops], clock)
        dist.destroy_process_group()
        spent.append(step_all - sum(plain))
        other += step_one - plain[rank]
    pipe.close()
    ops = ranks * microbatches * 2
    return {"penstock": median(spent) / ops, "torch": other / ops}


def _until_done() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def _static(received_result: Any = None) -> Tensor:
    return torch.ones(1, dtype=torch.int32)


def _no_calls(p2p_ops: list[dist.P2POp], desc: str | None = None) -> list[dist.Work]:
    """In place of torch's sends and receives."""
    return []


def prepare(rank: Rank) -> None:
    one = work(MICROBATCHES)
    for schedule in SCHEDULES:
        for way, transport in ((GLOO, "gloo"), (SHARED, None)):
            rank.kept[way, schedule] = ours(one, schedule, rank.count, transport=transport)[1]
        rank.kept[TORCH, schedule] = theirs(one, schedule, rank.index, rank.count).step


def in_processes(rank: Rank, schedule: str) -> list[float]:
    """Time per op in seconds, by way."""
    steps = [rank.kept[way, schedule] for way in (GLOO, SHARED, TORCH)]
    return [taken / (MICROBATCHES * 2) for taken in medians(steps, time.perf_counter)]


def measure(repeats: int) -> Found:
    rows: list[Row] = []
    raw: dict[str, Any] = {}
    counted = []
    with Pool(1, join=False) as pool:
        for schedule, ranks, count in CASES:
            take = partial(_one_process, pool, schedule, ranks, count)
            rounds = rounds_of(take, repeats, warm_up=0, others=None)
            raw[f"{schedule}, P={ranks}, m={count}"] = rounds.found
            mine, other = rounds["penstock"].middle * 1e6, rounds["torch"].middle * 1e6
            judged = BAR if (ranks, count) == (RANKS, MICROBATCHES) else None
            rows.append(measured(
                f"{schedule}, P={ranks}, m={count}, in process, no message", "cost per op",
                rounds.ratio("penstock", "torch"), "µs", ours=mine, torch=other, at_most=judged,
                quiet=rounds.quiet,
            ))  # fmt: skip
    with Pool(PROCESSES) as pool:
        pool.run(prepare)
        for schedule in SCHEDULES:
            rounds = rounds_of(partial(_processes, pool, schedule), repeats)
            raw[f"{schedule}, {PROCESSES} processes"] = rounds.found
            counted.append(rounds)
            case, other = f"{schedule}, {PROCESSES} processes", rounds[TORCH].middle * 1e6
            rows += [
                measured(case, f"{way} / {TORCH}: time per op", rounds.ratio(way, TORCH), "µs",
                         ours=rounds[way].middle * 1e6, torch=other)
                for way in (GLOO, SHARED)
            ]  # fmt: skip
    notes = [
        "in process: the step less the same forwards and backwards in a plain loop, per F or B, in the "
        "processor's time; penstock's ranks in one process, and the sum of torch's ranks, one after the "
        "other, whose sends and receives are left out",
        f"{PROCESSES} processes: the step per op of one rank, m={MICROBATCHES}, with messages and waiting",
        summary(counted),
    ]
    return Found("overhead", "Cost of the runtime per op, empty compute", rows, notes, raw)


def _one_process(pool: Pool, schedule: str, ranks: int, microbatches: int, _: int) -> Numbers:
    found: Numbers = pool.run(in_process, schedule, ranks, microbatches)[0]
    return found


def _processes(pool: Pool, schedule: str, _: int) -> Numbers:
    """Of the slower rank."""
    slowest = map(max, zip(*pool.run(in_processes, schedule), strict=True))
    return dict(zip((GLOO, SHARED, TORCH), slowest, strict=True))
