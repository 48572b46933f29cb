"""How long a step takes where computing takes a known time, over what `simulate` predicts.

Every stage sleeps 20 ms in its forward and 40 ms in its backward, 20 for the input's gradient and 20 for the
weight's, together or apart as the schedule has it, so that what is over the prediction is the library's own,
or the machine's. P = 4 over gloo, m = 16.

Both libraries do the same work: the input of every stage has a gradient, the first one's too, as behind an
embedding. Each rank counts its sleeps, and the benchmark fails where a count differs from 3 for each
microbatch of each stage. torch's first stage has no I: it leaves both sleeps to W, and is predicted so.

The limit of the machine is measured in the same rounds: a loop without a library that runs the same program
with the same sleeps, `isend` and `irecv`. What a step takes over the prediction is divided by its trace:
sleeps longer than asked, which each rank measures; ops as long as they were; the trace as a whole; the step.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from benchmarks.pool import Pool, Rank
from benchmarks.report import Found, Row, measured
from benchmarks.rivals import TORCH, Work, as_schedule, ours, theirs, torch_programs
from benchmarks.rounds import Interval, Rounds, in_turn, interval, summary
from penstock.runtime.split_backward.products import CALLS, Form
from penstock.schedule import Costs, Op, Schedule, Timeline, simulate
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


def _find(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, None, Form]:
    return hidden, weight, None, Form(slept, slow_input_gradient, slow_weight_gradient)


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


def measure(repeats: int) -> Found:
    rows: list[Row] = []
    raw: dict[str, Any] = {"latency": [], "latency without a pause": []}
    counted: list[Rounds] = []
    with Pool(RANKS) as mine, Pool(RANKS) as other:
        pools = {"penstock": mine, "torch": other}
        for pool in pools.values():
            pool.run(wake_at_once)
        other.pause()
        for name, form in FORMS.items():
            program = chosen_schedule(form, RANKS, MICROBATCHES)
            libraries = pools if name in TORCH else {"penstock": mine}
            rounds, steps, theirs, links = compare(name, program, libraries, repeats)
            rows += _rows(name, rounds, steps, links[0], program, theirs)
            counted.append(rounds)
            raw |= {
                f"{library} {name}": [s._replace(timeline=None) for s in of] for library, of in steps.items()
            }
            raw["latency"].append(links[0])
            raw["latency without a pause"].append(links[1])
        other.resume()
    link, hot = (median(raw[key]) * 1e6 for key in ("latency", "latency without a pause"))
    notes = [
        "step: from the first rank's start to the last rank's end, after a barrier; the libraries in turn, "
        f"each in processes of its own, the other's stopped meanwhile; {summary(counted)}",
        "equal work: every rank of both libraries slept 3 times for each microbatch of each of its stages, "
        "in every step, or this benchmark fails",
        f"simulate is given the one-way latency of {torch.zeros(HIDDEN).nbytes // 1024} KiB between two "
        f"ranks that do something else for {SECONDS * 1e3:.0f} ms before, as in the step: {link:.0f} µs; of "
        f"messages that follow at once it is {hot:.0f} µs",
        "limit: a loop without a library that runs the same program, with the same sleeps, isend and irecv",
        "over simulate, of penstock's steps: by what the prediction grows when it is given the mean length "
        "of each rank's sleeps, then each op's recorded length; then the recorded step, then the step",
        "sleeps as long as they were: simulate is given the mean length of each rank's sleeps in that step",
        "each library's ratios are to its own order of the ops, which differ",
    ]
    title = f"Step time, P={RANKS}, m={MICROBATCHES}, computing emulated by sleeping"
    return Found("steptime", title, rows, notes, raw)


def compare(
    name: str, program: Schedule, pools: Mapping[str, Pool], repeats: int
) -> tuple[Rounds, dict[str, list[Step]], Schedule, tuple[float, float]]:
    """Rounds, all steps by library, torch's order, and the link's latency with a pause and without."""
    theirs = program
    for library, pool in pools.items():
        pool.resume()
        if order := pool.run(prepare, library, name, program)[0]:
            theirs = as_schedule(name, order, RANKS, MICROBATCHES)
        pool.pause()
    steps: dict[str, list[Step]] = {library: [] for library in pools}

    def one(library: str) -> float:
        pools[library].resume()
        steps[library].append(step(pools[library], name, program))
        pools[library].pause()
        return steps[library][-1].wall

    def without() -> float:
        pools["penstock"].resume()
        wall = step(pools["penstock"], (LOOP, name), program).wall
        pools["penstock"].pause()
        return wall

    pools["penstock"].resume()
    pools["penstock"].run(prepare_loop, name, program)
    pools["penstock"].pause()
    rounds = in_turn({library: partial(one, library) for library in pools} | {LOOP: without}, repeats)
    for library, pool in pools.items():
        pool.resume()
        if library == "penstock":
            links = latency(pool, SECONDS), latency(pool, 0.0)
        pool.run(finish, name)
        if library == "torch":
            pool.pause()
    return rounds, steps, theirs, links


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


def _rows(
    name: str, rounds: Rounds, steps: dict[str, list[Step]], link: float, program: Schedule, theirs: Schedule
) -> list[Row]:
    """program: the order that penstock runs; theirs: torch's"""
    orders = {"penstock": program, "torch": theirs}
    base = {of: predicted(orders[of], link, of_torch=of == "torch") for of in steps}
    ideal = {of: predicted(orders[of], 0.0, of_torch=of == "torch") for of in steps}

    def over(library: str) -> Interval:
        """The step over what is predicted for sleeps as long as they were."""
        return interval([
            each.wall / predicted(orders[library], link, each.sleep, library == "torch")
            for each in steps[library]
        ])  # fmt: skip

    mine = rounds["penstock"]
    traces = [shares(each, program, link) for each in steps["penstock"]]
    rows = [
        measured(name, "step / simulate", mine.scaled(1 / base["penstock"]), at_most=BAR, quiet=rounds.quiet),
        measured(name, "step / limit", rounds.ratio("penstock", LOOP), at_most=BAR, quiet=rounds.quiet),
        measured(name, "limit / simulate", rounds[LOOP].scaled(1 / base["penstock"])),
        *(measured(name, f"over simulate: {what}", interval([trace[what] for trace in traces]), "%")
          for what in traces[0]),
    ]  # fmt: skip
    if "torch" not in steps:
        return [measured(name, "step", mine.scaled(1e3), "ms"), *rows]
    other = rounds["torch"].middle
    return [
        measured(name, "step", rounds.ratio("penstock", "torch"), "ms",
                 ours=mine.middle * 1e3, torch=other * 1e3),
        *rows,
        measured(name, "torch: step / simulate, of its own order", rounds["torch"].scaled(1 / base["torch"])),
        measured(name, "torch: step / simulate, sleeps as long as they were", over("torch")),
        measured(name, "step / zero-latency ideal",
                 rounds.ratio("penstock", "torch").scaled(ideal["torch"] / ideal["penstock"]),
                 ours=mine.middle / ideal["penstock"], torch=other / ideal["torch"], at_most=1.0,
                 quiet=rounds.quiet),
    ]  # fmt: skip


def shares(step: Step, program: Schedule, link: float) -> dict[str, float]:
    """What a step takes over the prediction, in percent of it, by the trace."""
    assert step.timeline is not None
    asked = predicted(program, link)
    slept = predicted(program, link, step.sleep)
    ops = simulate(program, replayed(program, step.timeline, link)).makespan
    trace = step.timeline.makespan
    return {
        "sleeps longer than asked": 100 * (slept - asked) / asked,
        "in ops, other than sleeping": 100 * (ops - slept) / asked,
        "between ops, and messages": 100 * (trace - ops) / asked,
        "before the first op and after the last": 100 * (step.wall - trace) / asked,
    }


def replayed(program: Schedule, timeline: Timeline, link: float) -> Costs:
    """Each op as long as it was."""
    rows = {kind: [[0.0] * program.microbatches for _ in range(program.stages)] for kind in ("F", "I", "W")}
    for span in timeline.spans:
        kind = "I" if span.op.kind == "B" else span.op.kind
        rows[kind][span.op.stage][span.op.microbatch] = span.end - span.start
    return Costs(rows["F"], rows["I"], rows["W"], communication=link)
