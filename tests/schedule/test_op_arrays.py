"""What is timed on arrays, against one op at a time."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.schedule import Costs, Op, Pair, Schedule, build, simulate, verify
from support.programs import paired, valid

any_number = st.floats(0, 3, allow_nan=False)


@settings(max_examples=60, deadline=None)
@given(valid())
def test_the_arrays_and_the_schedule_have_the_same_dependencies(schedule: Schedule) -> None:
    arrays = verify(schedule).arrays
    for at, op in enumerate(arrays.ops):
        needed = [int(column[at]) for column in (arrays.own, arrays.source) if column[at] >= 0]
        assert tuple(arrays.ops[other] for other in needed) == schedule.predecessors(op)
        source = schedule.source(op)
        assert source is None or schedule.taker(source) == op
        hosts = schedule.placement.rank_of
        assert arrays.crosses[at] == (source is not None and hosts[source.stage] != hosts[op.stage])
    taken = {schedule.source(op) for op in arrays.ops} - {None}
    assert taken == {op for op in arrays.ops if schedule.taker(op) is not None}


@settings(max_examples=80, deadline=None)
@given(st.one_of(valid(), paired()), st.lists(any_number, min_size=4, max_size=4), st.booleans())
def test_times_are_to_the_last_digit_those_of_one_op_after_another(
    schedule: Schedule, numbers: list[float], exchanges: bool
) -> None:
    forward, input_grad, weight_grad, latency = numbers
    costs = Costs(forward, input_grad, weight_grad, latency)
    if exchanges:
        costs = replace(costs, exchange=forward / 2, exchange_in_backward=input_grad / 3)
    try:
        timeline = simulate(schedule, costs)
    except ScheduleError:
        return
    assert {span.op: (span.start, span.end) for span in timeline.spans} == slowly(schedule, costs)


def slowly(schedule: Schedule, costs: Costs) -> dict[Op, tuple[float, float]]:
    """Start and end of each op: every rank in turn runs its next op or pair once its inputs are known."""
    hosts, count = schedule.placement.rank_of, schedule.microbatches
    lengths = {kind: costs.durations(kind, schedule.placement, count) for kind in ("F", "B", "I", "W")}
    together = costs.side_by_side(schedule.placement, count) if costs.overlaps else None
    found: dict[Op, tuple[float, float]] = {}
    left = [list(program) for program in schedule.programs]
    free_at = [0.0] * schedule.ranks
    while any(left):
        for rank, program in enumerate(left):
            ops = program[:1]
            if together and tuple(program[:2]) in schedule.overlaps:
                ops = program[:2]
            needed = [each for op in ops for each in schedule.predecessors(op)]
            if not ops or not all(each in found for each in needed):
                continue
            arrive = [found[each][1] + (costs.communication if hosts[each.stage] != rank else 0.0)
                      for each in needed]  # fmt: skip
            start = max([free_at[rank], *arrive])
            takes = lengths[ops[0].kind][ops[0].stage][ops[0].microbatch]
            if together and len(ops) == 2:
                takes = together(Pair(*ops))
            for op in ops:
                found[op] = start, start + takes
            free_at[rank] = start + takes
            del program[: len(ops)]
    return found


def test_as_many_ops_wait_as_ranks_not_as_microbatches() -> None:
    """The order is found in long stretches: the ranks of 1F1B alternate by rounds, not by single ops."""
    proof = verify(build("interleaved_1f1b", ranks=8, microbatches=64, stages_per_rank=2))
    arrays, order = proof.arrays, proof.order
    switches = sum(arrays.rank[one] != arrays.rank[other] for one, other in pairwise(order))
    assert sorted(order) == list(range(len(order)))
    assert switches < len(order) / 2
