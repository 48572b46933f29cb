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


def prepare(rank: Rank, library: str) -> None:
    torch.manual_seed(0)
    shape = (HIDDEN[0] * MICROBATCHES, *HIDDEN[1:])
    work = Work(Sleeper, first, torch.randn(shape), torch.randn(shape), MICROBATCHES)
    for schedule in SCHEDULES:
        if library == "penstock":
            rank.kept["pipe", schedule], rank.kept[schedule] = ours(work, schedule, rank.count)
        else:
            rank.kept[schedule] = theirs(work, schedule, rank.index, rank.count)[1]
        rank.kept[schedule]()  # the first step makes what later ones reuse


def timed(rank: Rank, schedule: str) -> tuple[float, float, Timeline | None]:
    """Start and end of one step on this rank, and the timeline where the library has one."""
    dist.barrier()
    start = time.perf_counter()
    rank.kept[schedule]()
    end = time.perf_counter()
    pipe = rank.kept.get(("pipe", schedule))
    return start, end, None if pipe is None else pipe.timeline


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


def oversleep(_: Rank) -> float:
    """How much longer than asked a sleep of one forward takes."""
    times = []
    for _round in range(20):
        start = time.perf_counter()
        time.sleep(SECONDS)
        times.append(time.perf_counter() - start - SECONDS)
    return median(times)


def measure(repeats: int) -> Found:
    walls: dict[tuple[str, str], list[float]] = {}
    timelines: dict[str, list[Timeline]] = {schedule: [] for schedule in SCHEDULES}
    latencies, hot = [], []
    with Pool(RANKS) as mine, Pool(RANKS) as other:
        pools = {"penstock": mine, "torch": other}
        for library, pool in pools.items():
            pool.run(prepare, library)
            pool.pause()
        for _ in range(repeats):
            for library, pool in pools.items():
                pool.resume()
                for schedule in SCHEDULES:
                    results = pool.run(timed, schedule)
                    wall = max(r[1] for r in results) - min(r[0] for r in results)
                    walls.setdefault((library, schedule), []).append(wall)
                    if library == "penstock":
                        timelines[schedule].append(results[0][2])
                if library == "penstock":
                    latencies.append(latency(pool, SECONDS))
                    hot.append(latency(pool, 0.0))
                    late = median(pool.run(oversleep))
                pool.pause()
        mine.resume()
        other.resume()
    rows = [row for s in SCHEDULES for row in _rows(s, walls, timelines[s], median(latencies))]
    notes = [
        "a step's time: from its first start to its last end over the ranks, after a barrier; median of "
        f"{repeats}, the libraries in turn, each in processes of its own, the other's stopped meanwhile",
        f"one-way latency of {torch.zeros(HIDDEN).nbytes // 1024} KiB between two ranks that do something "
        f"else for {SECONDS * 1e3:.0f} ms before, as in the step: {median(latencies) * 1e6:.0f} µs, which "
        f"`simulate` is given; of messages that follow at once: {median(hot) * 1e6:.0f} µs",
        f"a sleep of {SECONDS * 1e3:.0f} ms takes {late * 1e6:.0f} µs longer than asked, all ranks at it; "
        "nothing is subtracted",
        "recorded: from the first op's start to the last op's end; ops as long as they really were: "
        "`simulate` is given the medians of the ops' recorded times; what lies between ops is left",
    ]
    raw = {f"{lib} {s}": times for (lib, s), times in walls.items()}
    raw |= {f"recorded {s}": [timeline.makespan for timeline in timelines[s]] for s in SCHEDULES}
    raw |= {"latency": latencies, "latency without a pause": hot, "oversleep": [late]}
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
