"""How long a step takes where computing takes a known time, over what `simulate` predicts.

Every stage sleeps 20 ms in its forward and 40 ms in its backward, 20 for the input's gradient and 20 for the
weight's, together or apart as the schedule has it, so that what is over the prediction is the library's own.
P = 4 over gloo, m = 16.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from benchmarks.pool import Pool, Rank
from benchmarks.report import Found, Row
from benchmarks.rivals import TORCH, Work, as_schedule, ours, theirs, torch_programs
from penstock.runtime.split_backward.products import CALLS, Form
from penstock.schedule import Costs, Schedule, Timeline, simulate
from penstock.schedule.choose import ScheduleLike, chosen_schedule

RANKS, MICROBATCHES, SECONDS = 4, 16, 0.02
HIDDEN = (1, 128, 256)  # rows, sequence, width: 128 KiB a message
BAR = 1.02
# torch's schedules under penstock's names, and those that torch lacks
FORMS: dict[str, ScheduleLike] = {
    **{name: name for name in TORCH},
    "looped_bfs": "looped_bfs",
    "zb_h1": "zb_h1",
    "zb_h2": "zb_h2",
    "v_half": "v_half",
    "v_min": "v_min",
    "dualpipe": "dualpipe",
    "hanayo": "hanayo",
    "searched": {"schedule": "searched", "memory_limit": 6, "seconds": 5},
}


def sleep() -> None:
    time.sleep(SECONDS)


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


def _find(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, None, Form]:
    return hidden, weight, None, Form(slept, slow_input_gradient, slow_weight_gradient)


class Sleeper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return product(x, self.weight)


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
        result: Tensor = Attach.apply(SleepInput.apply(x), weight)  # type: ignore[no-untyped-call]
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
        rank.kept["pipe", schedule], rank.kept[schedule] = ours(work, program, rank.count)
    else:
        made = theirs(work, schedule, rank.index, rank.count)
        rank.kept[schedule], order = made.step, torch_programs(schedule, made.runner)
    rank.kept[schedule]()  # the first step makes what later ones reuse
    return order


def finish(rank: Rank, schedule: str) -> None:
    """Its threads would cost the next one time."""
    del rank.kept[schedule]
    if (pipe := rank.kept.pop(("pipe", schedule), None)) is not None:
        pipe.close()


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
        sleep()
        times.append(time.perf_counter() - start - SECONDS)
    return median(times)


def measure(repeats: int) -> Found:
    walls: dict[tuple[str, str], list[float]] = {}
    timelines: dict[str, list[Timeline]] = {schedule: [] for schedule in FORMS}
    latencies, hot = [], []
    built = {name: chosen_schedule(form, RANKS, MICROBATCHES) for name, form in FORMS.items()}
    orders: dict[str, list[list[str]]] = {}
    with Pool(RANKS) as mine, Pool(RANKS) as other:
        pools = {"penstock": mine, "torch": other}
        other.pause()
        for schedule, program in built.items():
            both = {name: pool for name, pool in pools.items() if name == "penstock" or schedule in TORCH}
            for library, pool in both.items():
                pool.resume()
                order = pool.run(prepare, library, schedule, program)[0]
                orders |= {schedule: order} if order else {}
                pool.pause()
            for _ in range(repeats):
                for library, pool in both.items():
                    pool.resume()
                    results = pool.run(timed, schedule)
                    wall = max(r[1] for r in results) - min(r[0] for r in results)
                    walls.setdefault((library, schedule), []).append(wall)
                    if library == "penstock":
                        timelines[schedule].append(results[0][2])
                    pool.pause()
            for library, pool in both.items():
                pool.resume()
                if library == "penstock":
                    latencies.append(latency(pool, SECONDS))
                    hot.append(latency(pool, 0.0))
                    late = median(pool.run(oversleep))
                pool.run(finish, schedule)
                pool.pause()
        mine.resume()
        other.resume()
    theirs = {name: as_schedule(name, order, RANKS, MICROBATCHES) for name, order in orders.items()}
    rows = [
        row
        for name, program in built.items()
        for row in _rows(name, walls, timelines[name], median(latencies), program, theirs.get(name, program))
    ]
    notes = [
        "a step's time: from its first start to its last end over the ranks, after a barrier; median of "
        f"{repeats}, the libraries in turn, each in processes of its own, the other's stopped meanwhile, and "
        "one pipeline at a time",
        f"one-way latency of {torch.zeros(HIDDEN).nbytes // 1024} KiB between two ranks that do something "
        f"else for {SECONDS * 1e3:.0f} ms before, as in the step: {median(latencies) * 1e6:.0f} µs, which "
        f"`simulate` is given; of messages that follow at once: {median(hot) * 1e6:.0f} µs",
        f"a sleep of {SECONDS * 1e3:.0f} ms takes {late * 1e6:.0f} µs longer than asked, all ranks at it; "
        "nothing is subtracted",
        "recorded: from the first op's start to the last op's end; ops as long as they really were: "
        "`simulate` is given the medians of the ops' recorded times; what lies between ops is left",
        "each library's ratios are to its own order of the ops, which differ; torch's times beside ours are "
        "of the schedule of that name",
    ]
    raw = {f"{lib} {s}": times for (lib, s), times in walls.items()}
    raw |= {f"recorded {s}": [timeline.makespan for timeline in timelines[s]] for s in FORMS}
    raw |= {"latency": latencies, "latency without a pause": hot, "oversleep": [late]}
    title = f"Step time, P={RANKS}, m={MICROBATCHES}, computing emulated by sleeping"
    return Found("steptime", title, rows, notes, raw)


def _predicted(program: Schedule, communication: float) -> float:
    costs = Costs(forward=SECONDS, input_grad=SECONDS, weight_grad=SECONDS, communication=communication)
    return simulate(program, costs).makespan


def _rows(
    schedule: str,
    walls: dict[tuple[str, str], list[float]],
    timelines: list[Timeline],
    latency: float,
    program: Schedule,
    theirs: Schedule,
) -> list[Row]:
    """program: the order that penstock runs; theirs: torch's"""
    recorded = median(timeline.makespan for timeline in timelines)
    between = median(
        timeline.makespan / simulate(program, Costs.measured(timeline, latency)).makespan
        for timeline in timelines
    )
    mine = median(walls["penstock", schedule])
    over, ideal = mine / _predicted(program, latency), mine / _predicted(program, 0.0)
    other = median(walls["torch", schedule]) if schedule in TORCH else None
    other_over = other and other / _predicted(theirs, latency)
    other_ideal = other and other / _predicted(theirs, 0.0)
    return [
        Row(schedule, "step", mine * 1e3, "ms", other and other * 1e3),
        Row(schedule, "step / simulate", over, "", other_over, f"at most {BAR}", over <= BAR),
        Row(schedule, "recorded / simulate", recorded / _predicted(program, latency)),
        Row(schedule, "recorded / simulate, ops as long as they really were", between),
        Row(schedule, "step / zero-latency ideal", ideal, "", other_ideal,
            "not above torch's" if other_ideal else "", ideal <= other_ideal if other_ideal else None),
    ]  # fmt: skip
