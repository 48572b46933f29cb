"""Run a schedule on paper."""

from __future__ import annotations

from itertools import chain, pairwise
from typing import NamedTuple

from penstock.schedule.costs import Costs
from penstock.schedule.memory import memory
from penstock.schedule.ops import Op, Pair, Schedule
from penstock.schedule.order import NOTHING, Numbers, Walk
from penstock.schedule.timeline import Span, Timeline, Wait
from penstock.schedule.verify import verify


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Start every op as soon as its rank is free and its inputs are there, in program order.

    An input from another rank is there when the edge's delay is over after its op ended. Overlapped pairs run
    one after the other; with `Costs.exchange` side by side: both begin when both their inputs are there, and
    both count as ended when the pair has. Times are in the unit of `costs` (unit times where none are given)
    and begin at 0. Raises ScheduleError for a schedule that `verify` refuses.
    """
    costs = costs or Costs()
    proof = verify(schedule)
    numbers = Numbers(schedule)
    run = _Run(schedule, numbers, costs)
    spans = tuple(
        Span(rank, op, *time)
        for rank, program in enumerate(schedule.programs)
        for op, time in zip(program, run.times[rank], strict=True)
    )
    return Timeline(
        schedule.name,
        schedule.ranks,
        spans,
        proof.peak_live,
        memory(schedule, costs, run.times),
        _critical_path(schedule, numbers, run.last_to_end(), run.held_up_by),
        schedule.overlaps,
        tuple(chain.from_iterable(run.waits)),
    )


class _Run:
    """When each op runs, and what holds it up.

    times, waits: by rank, in program order; ended, held_up_by: by op; last: by rank, the op that it ends with
    """

    def __init__(self, schedule: Schedule, numbers: Numbers, costs: Costs) -> None:
        programs = [numbers.program(program) for program in schedule.programs]
        needs = [numbers.needs(program) for program in programs]
        durations = _durations(schedule, costs)
        delays = _delays(schedule, numbers, costs)
        self.ended = ended = [0.0] * (numbers.count + 1)  # the last one: needing nothing never holds an op up
        self.held_up_by = held_up_by = [NOTHING] * numbers.count
        self.last = last = [NOTHING] * schedule.ranks
        self.times: list[list[tuple[float, float]]] = [[] for _ in programs]
        self.waits: list[list[Wait]] = [[] for _ in programs]
        free_at = [0.0] * schedule.ranks
        pairs = _pairs(schedule, programs, costs)
        together = {first: needs[rank][at + 1] for first, (rank, at, _) in pairs.items()}
        for rank, at in Walk(numbers, programs, needs, together=together):
            if at < len(self.times[rank]):  # the second of a pair, which ran with the first
                continue
            start, held_up = free_at[rank], last[rank]
            pair = pairs.get(programs[rank][at])
            beyond = at + (1 if pair is None else 2)
            for place in range(at, beyond):  # a pair waits for both its inputs
                number, needed = programs[rank][place], needs[rank][place]
                there = ended[needed]
                if needed != NOTHING:
                    there += delays[min(number, needed)]
                if there > start:
                    op = schedule.programs[rank][place]
                    self.waits[rank].append(Wait(rank, op, start, there, ended[needed]))
                    start, held_up = there, needed
            end = start + (durations[rank][at] if pair is None else pair.takes)
            for number in programs[rank][at:beyond]:
                ended[number], held_up_by[number] = end, held_up
                self.times[rank].append((start, end))
            free_at[rank], last[rank] = end, number

    def last_to_end(self) -> int:
        """Of the ranks' last ops."""
        ended = self.ended.__getitem__
        return max((number for number in self.last if number != NOTHING), key=ended, default=NOTHING)


class _Pair(NamedTuple):
    """Where the first op of an overlapped pair stands, and how long the two take side by side."""

    rank: int
    at: int
    takes: float


def _pairs(schedule: Schedule, programs: list[list[int]], costs: Costs) -> dict[int, _Pair]:
    """By the number of the first op; none where they run one after the other."""
    if not costs.overlaps or not schedule.overlaps:
        return {}
    takes = costs.side_by_side(schedule.placement, schedule.microbatches)
    return {
        programs[rank][at]: _Pair(rank, at, takes(Pair(*two)))
        for rank, program in enumerate(schedule.programs)
        for at, two in enumerate(pairwise(program))
        if two in schedule.overlaps
    }


def _durations(schedule: Schedule, costs: Costs) -> list[list[float]]:
    """By rank and position."""
    by_kind = {kind: costs.durations(kind, schedule.placement, schedule.microbatches)
               for kind in ("F", "B", "I", "W")}  # fmt: skip
    return [[by_kind[kind][stage][microbatch] for stage, kind, microbatch in program]
            for program in schedule.programs]  # fmt: skip


def _delays(schedule: Schedule, numbers: Numbers, costs: Costs) -> list[float]:
    """By number of the op in front of the edge, forward or backward: how long its result is on the way."""
    hosts, delays = schedule.placement.rank_of, [0.0] * numbers.count
    for stage, row in enumerate(costs.delays(schedule.placement, schedule.microbatches)):
        if stage + 1 < schedule.stages and hosts[stage] != hosts[stage + 1]:
            first = stage * numbers.row
            delays[first : first + numbers.row : 3] = row
            delays[first + 1 : first + numbers.row : 3] = row
    return delays


def _critical_path(schedule: Schedule, numbers: Numbers, at: int, held_up_by: list[int]) -> tuple[Op, ...]:
    """From the op `at` back to one that nothing holds up, in order of time."""
    path: list[Op] = []
    while at != NOTHING:
        stage, microbatch, slot = numbers.places(at)
        own = Op(stage, "W" if slot == 2 else "F", microbatch)
        path.append(schedule.gradient(stage, microbatch) if slot == 1 else own)
        at = held_up_by[at]
    return tuple(reversed(path))
