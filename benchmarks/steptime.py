"""How long a step takes where computing takes a known time, over what `simulate` predicts.

Every stage sleeps 20 ms in its forward and 40 ms in its backward (20 for the input's gradient, 20 for the
weight's), so that what is over the prediction is the library's own. P = 4 over gloo, m = 16.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.pool import Pool, Rank
from benchmarks.report import Found, Row
from benchmarks.rivals import SCHEDULES, Work, ours, theirs
from penstock.schedule import Costs, Timeline, build, simulate

RANKS, MICROBATCHES, SECONDS = 4, 16, 0.02
HIDDEN = (1, 128, 256)  # rows, sequence, width: 128 KiB a message
BAR = 1.02


class Sleep(torch.autograd.Function):
    """Touches no value: what it takes beyond the sleep would count as the library's."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        if not hidden.is_meta:  # while shapes are learnt
            time.sleep(SECONDS)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        time.sleep(2 * SECONDS)
        return gradients[0], torch.zeros(())


class Sleeper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        slept: Tensor = Sleep.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return slept


def first(output: Tensor, target: Tensor) -> Tensor:
    return output[0, 0, 0]


def prepare(rank: Rank) -> None:
    torch.manual_seed(0)
    shape = (HIDDEN[0] * MICROBATCHES, *HIDDEN[1:])
    work = Work(Sleeper, first, torch.randn(shape), torch.randn(shape), MICROBATCHES)
    for schedule in SCHEDULES:
        pipe, step = ours(work, schedule, rank.count)
        rank.kept["pipe", schedule] = pipe
        rank.kept["penstock", schedule] = step
        rank.kept["torch", schedule] = theirs(work, schedule, rank.index, rank.count)[1]
        rank.kept["penstock", schedule]()  # the first step of either makes what later ones reuse
        rank.kept["torch", schedule]()


def timed(rank: Rank, library: str, schedule: str) -> tuple[float, float, Timeline | None]:
    """Start and end of one step on this rank, and the timeline where the library has one."""
    step = rank.kept[library, schedule]
    dist.barrier()
    start = time.perf_counter()
    step()
    end = time.perf_counter()
    return start, end, rank.kept["pipe", schedule].timeline if library == "penstock" else None


def ping_pong(rank: Rank, rounds: int) -> float:
    """One-way latency between ranks 0 and 1, in a group of the kind that penstock's channels have."""
    group = dist.new_group([0, 1])
    if rank.index > 1:
        return 0.0
    message, peer = torch.zeros(HIDDEN), 1 - rank.index
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for sends in (rank.is_first, not rank.is_first):
            work = dist.isend(message, peer, group) if sends else dist.irecv(message, peer, group)
            assert work is not None
            work.wait()
        times.append((time.perf_counter() - start) / 2)
    return median(times)


def oversleep(_: Rank) -> float:
    """How much longer than asked a sleep of one forward takes."""
    times = []
    for _round in range(20):
        start = time.perf_counter()
        time.sleep(SECONDS)
        times.append(time.perf_counter() - start - SECONDS)
    return median(times)


def measure(repeats: int) -> Found:
    walls: dict[tuple[str, str], list[float]] = {
        (lib, s): [] for s in SCHEDULES for lib in ("penstock", "torch")
    }
    timelines: dict[str, list[Timeline]] = {schedule: [] for schedule in SCHEDULES}
    latencies = []
    with Pool(RANKS) as pool:
        pool.run(prepare)
        late = median(pool.run(oversleep))
        for _ in range(repeats):
            latencies.append(pool.run(ping_pong, 200)[0])
            for library, schedule in walls:
                results = pool.run(timed, library, schedule)
                walls[library, schedule].append(max(r[1] for r in results) - min(r[0] for r in results))
                if library == "penstock":
                    timelines[schedule].append(results[0][2])
    rows = [row for s in SCHEDULES for row in _rows(s, walls, timelines[s], median(latencies))]
    notes = [
        "a step's time: from its first start to its last end over the ranks, after a barrier; median of "
        f"{repeats}, the libraries in turn; one-way latency of {torch.zeros(HIDDEN).nbytes // 1024} KiB "
        f"between two ranks, by ping-pong: {median(latencies) * 1e6:.0f} µs",
        f"a sleep of {SECONDS * 1e3:.0f} ms takes {late * 1e6:.0f} µs longer than asked, all ranks at it; "
        "nothing is subtracted",
        "recorded: from the first op's start to the last op's end; ops as long as they really were: "
        "`simulate` is given the medians of the ops' recorded times; what lies between ops is left",
    ]
    raw = {f"{lib} {s}": times for (lib, s), times in walls.items()}
    raw |= {f"recorded {s}": [timeline.makespan for timeline in timelines[s]] for s in SCHEDULES}
    raw |= {"latency": latencies, "oversleep": [late]}
    title = f"Step time, P={RANKS}, m={MICROBATCHES}, computing emulated by sleeping"
    return Found("steptime", title, rows, notes, raw)


def _rows(
    schedule: str, walls: dict[tuple[str, str], list[float]], timelines: list[Timeline], latency: float
) -> list[Row]:
    program = build(schedule, ranks=RANKS, microbatches=MICROBATCHES)

    def predicted(communication: float) -> float:
        costs = Costs(forward=SECONDS, input_grad=SECONDS, weight_grad=SECONDS, communication=communication)
        return simulate(program, costs).makespan

    recorded = median(timeline.makespan for timeline in timelines)
    between = median(
        timeline.makespan / simulate(program, Costs.measured(timeline, latency)).makespan
        for timeline in timelines
    )
    mine, other = median(walls["penstock", schedule]), median(walls["torch", schedule])
    over, ideal = mine / predicted(latency), mine / predicted(0.0)
    other_ideal = other / predicted(0.0)
    return [
        Row(schedule, "step", mine * 1e3, "ms", other * 1e3),
        Row(schedule, "step / simulate", over, "", other / predicted(latency), f"at most {BAR}", over <= BAR),
        Row(schedule, "recorded / simulate", recorded / predicted(latency)),
        Row(schedule, "recorded / simulate, ops as long as they really were", between),
        Row(schedule, "step / zero-latency ideal", ideal, "", other_ideal, "not above torch's",
            ideal <= other_ideal),
    ]  # fmt: skip
