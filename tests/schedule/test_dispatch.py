"""A rank that is free begins what a rule picks, and is asked again when something can have changed."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from penstock.schedule import Costs, loop, simulate, wave
from penstock.schedule.dispatch import SPLIT, DispatchState, OpCosts, by_op, dispatch, input_delays
from penstock.schedule.op_arrays import NOTHING
from penstock.schedule.ops import Placement, both_ways
from penstock.schedule.search.problem import problem

COSTS = Costs([1, 0.5], 1.25, 0.75, communication=0.125)


def costs_of(placement: Placement, microbatches: int = 3) -> OpCosts:
    count, times = placement.stages * microbatches, [
        COSTS.durations(kind, placement, microbatches) for kind in SPLIT
    ]  # fmt: skip
    delays = input_delays(placement, COSTS.delays(placement, microbatches))
    copies = tuple(i % placement.replicas for i in range(microbatches))
    return OpCosts(
        placement, microbatches, copies, by_op(zip(*times, strict=True)), by_op(delays),
        [1, 0, 0] * count, [0, 0, 1] * count,
    )  # fmt: skip


def any_ready(state: DispatchState) -> Callable[[int, float], tuple[int, float]]:
    """The first line with a ready op. It never asks to be woken."""

    def next_op(rank: int, now: float) -> tuple[int, float]:
        costs = state.costs
        for line in costs.lines_of[rank]:
            ops, at = costs.lines[line], state.done[line]
            if at < len(ops) and not state.missing[ops[at]] and state.ready_at[ops[at]] <= now:
                return ops[at], inf
        return NOTHING, inf

    return next_op


def test_what_is_dispatched_runs_as_it_is_simulated() -> None:
    for placement in (loop(2), both_ways(2)):
        costs = costs_of(placement)
        end = dispatch(costs, any_ready)
        assert end.is_complete
        timeline = simulate(costs.schedule("any", end.programs), COSTS)
        assert timeline.makespan == max(end.free_at)


def test_a_rank_that_finds_nothing_ends_the_run() -> None:
    end = dispatch(costs_of(loop(2)), lambda state: lambda rank, now: (NOTHING, inf))
    assert not end.is_complete
    assert end.programs == [[], []]


def test_a_rank_is_asked_when_its_rule_wants_it_and_ahead_of_an_input() -> None:
    asked: list[tuple[float, int]] = []

    def rule(state: DispatchState) -> Callable[[int, float], tuple[int, float]]:
        follow = any_ready(state)

        def next_op(rank: int, now: float) -> tuple[int, float]:
            asked.append((now, rank))
            op, _ = follow(rank, now)
            return op, 0.25 if rank == 1 and now < 0.25 else inf

        return next_op

    dispatch(costs_of(loop(2), 1), rule, ahead=0.5)
    # 0F0 takes 1 and travels .125; rank 1 asks for .25, is asked .5 ahead of the input
    assert [now for now, rank in asked if rank == 1][:3] == [0, 0.25, 0.625]


def test_the_first_microbatches_cost_what_they_cost_among_all() -> None:
    for placement in (loop(2), both_ways(2)):
        many = costs_of(placement, 5)
        assert many.first(3) == costs_of(placement, 3)
        assert many.first(9) == many


def test_a_line_has_its_microbatches_in_order() -> None:
    costs = costs_of(loop(2))
    assert costs.in_order([0, 0, 1, 2, 0]) == [0, 3, 1, 2, 6]


def test_an_op_needs_the_same_as_in_the_arrays_of_its_schedule() -> None:
    costs = problem(wave(2), 2, Costs(), [None, None])
    for op, needed in enumerate(costs.need):
        assert needed == NOTHING or costs.feeds[needed] == op
    assert sum(needed == NOTHING for needed in costs.need) == 2 * (
        1 + 1 + 4
    )  # the first F, the last I, every W
