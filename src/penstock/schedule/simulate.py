"""Run a schedule on paper."""

from __future__ import annotations

from penstock.schedule.costs import Costs
from penstock.schedule.ops import Op, Schedule
from penstock.schedule.order import Walk
from penstock.schedule.timeline import Span, Timeline
from penstock.schedule.verify import verify


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Start every op as soon as its rank is free and its inputs are there, in program order.

    An input from another rank is there `costs.communication` after its op ended. Times are in the unit of
    `costs` (unit times where none are given) and begin at 0. Raises ScheduleError for a schedule that
    `verify` refuses.
    """
    costs = costs or Costs()
    proof = verify(schedule)
    stages, hosts = schedule.stages, schedule.placement.rank_of
    durations = {"F": costs.durations("F", stages), "B": costs.durations("B", stages)}
    ended: dict[Op, float] = {}
    free_at = [0.0] * schedule.ranks
    spans: list[Span] = []
    for rank, op in Walk(schedule):
        start = free_at[rank]
        for needed in op.predecessors(stages):
            latency = 0.0 if hosts[needed.stage] == rank else costs.communication
            start = max(start, ended[needed] + latency)
        ended[op] = free_at[rank] = start + durations[op.kind][op.stage]
        spans.append(Span(rank, op, start, ended[op]))
    spans.sort(key=lambda span: (span.rank, span.start))
    return Timeline(schedule.name, schedule.ranks, tuple(spans), proof.peak_live)
