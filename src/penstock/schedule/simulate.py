"""Run a schedule on paper."""

from __future__ import annotations

from penstock.schedule.costs import Costs, holds
from penstock.schedule.ops import Op, Schedule
from penstock.schedule.order import NOTHING, Numbers, Walk
from penstock.schedule.timeline import Curve, Span, Timeline, curve
from penstock.schedule.verify import verify


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Start every op as soon as its rank is free and its inputs are there, in program order.

    An input from another rank is there when the edge's delay is over after its op ended. Overlapped pairs run
    one after the other. Times are in the unit of `costs` (unit times where none are given) and begin at 0.
    Raises ScheduleError for a schedule that `verify` refuses.
    """
    costs = costs or Costs()
    proof = verify(schedule)
    numbers = Numbers(schedule)
    programs = [numbers.program(program) for program in schedule.programs]
    needs = [numbers.needs(program) for program in programs]
    durations = _durations(schedule, costs)
    delays = _delays(schedule, numbers, costs)
    ended = [0.0] * (numbers.count + 1)  # the last one: needing nothing never holds an op up
    held_up_by = [NOTHING] * numbers.count
    free_at, last = [0.0] * schedule.ranks, [NOTHING] * schedule.ranks
    times: list[list[tuple[float, float]]] = [[] for _ in programs]
    for rank, at in Walk(numbers, programs, needs):
        number, needed = programs[rank][at], needs[rank][at]
        start, there = free_at[rank], ended[needed]
        if needed != NOTHING:
            there += delays[min(number, needed)]
        if there > start:
            start, held_up_by[number] = there, needed
        else:
            held_up_by[number] = last[rank]
        end = start + durations[rank][at]
        ended[number] = free_at[rank] = end
        last[rank] = number
        times[rank].append((start, end))
    spans = tuple(
        Span(rank, op, *time)
        for rank, program in enumerate(schedule.programs)
        for op, time in zip(program, times[rank], strict=True)
    )
    return Timeline(
        schedule.name,
        schedule.ranks,
        spans,
        proof.peak_live,
        _memory(schedule, costs, times),
        _critical_path(schedule, numbers, _last_to_end(last, ended), held_up_by),
        schedule.overlaps,
    )


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


def _memory(schedule: Schedule, costs: Costs, times: list[list[tuple[float, float]]]) -> tuple[Curve, ...]:
    changes = holds(costs, schedule)
    return tuple(
        curve(
            (start if op.kind == "F" else end, changes.get(op, 0.0))
            for op, (start, end) in zip(program, of_rank, strict=True)
        )
        for program, of_rank in zip(schedule.programs, times, strict=True)
    )


def _last_to_end(last: list[int], ended: list[float]) -> int:
    """Of the ranks' last ops."""
    return max((number for number in last if number != NOTHING), key=ended.__getitem__, default=NOTHING)


def _critical_path(schedule: Schedule, numbers: Numbers, at: int, held_up_by: list[int]) -> tuple[Op, ...]:
    """From the op `at` back to one that nothing holds up, in order of time."""
    path: list[Op] = []
    while at != NOTHING:
        stage, microbatch, slot = numbers.places(at)
        own = Op(stage, "W" if slot == 2 else "F", microbatch)
        path.append(schedule.gradient(stage, microbatch) if slot == 1 else own)
        at = held_up_by[at]
    return tuple(reversed(path))
