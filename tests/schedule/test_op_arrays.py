"""What is decided and timed on arrays, against one op at a time."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.schedule import Costs, Op, Pair, Schedule, build, simulate, verify
from penstock.schedule.verify import all_violations, ordered
from support.programs import paired, perhaps_broken, valid

any_number = st.floats(0, 3, allow_nan=False)


@settings(max_examples=150, deadline=None)
@given(st.one_of(perhaps_broken(), paired()))
def test_the_arrays_and_the_list_of_violations_agree(schedule: Schedule) -> None:
    violations = all_violations(schedule)
    assert (ordered(schedule) is not None) == (not violations), f"{schedule.placement}\n{schedule}"
    if not violations:
        assert verify(schedule)
        return
    with pytest.raises(ScheduleError) as caught:
        verify(schedule)
    assert caught.value.violations == tuple(violations)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["1f1b", "interleaved_zero_bubble", "zb_v", "dualpipe", "dualpipe_v"]), st.data())
def test_they_agree_on_built_schedules_with_one_change(name: str, data: st.DataObject) -> None:
    schedule = build(name, ranks=4, microbatches=8)
    programs = [list(program) for program in schedule.programs]
    program = programs[data.draw(st.integers(0, 3))]
    here, there = (data.draw(st.integers(0, len(program) - 1)) for _ in range(2))
    match data.draw(st.sampled_from(["swap", "move", "kind"])):
        case "swap":
            program[here], program[there] = program[there], program[here]
        case "move":
            program.insert(there, program.pop(here))
        case _:
            program[here] = program[here]._replace(kind=data.draw(st.sampled_from(["F", "B", "I", "W"])))
    changed = replace(schedule, programs=tuple(map(tuple, programs)))
    assert (ordered(changed) is not None) == (not all_violations(changed))


@settings(max_examples=80, deadline=None)
@given(st.one_of(valid(), paired()), st.lists(any_number, min_size=4, max_size=4), st.booleans())
def test_times_are_to_the_last_digit_those_of_one_op_after_another(
    schedule: Schedule, numbers: list[float], exchanges: bool
) -> None:
    forward, input_grad, weight_grad, latency = numbers
    costs = Costs(forward, input_grad, weight_grad, latency)
    if exchanges:
        costs = replace(costs, exchange=forward / 2, exchange_in_backward=input_grad / 3)
    if ordered(schedule) is None:
        return
    timeline = simulate(schedule, costs)
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
    valid_schedule = ordered(build("interleaved_1f1b", ranks=8, microbatches=64, stages_per_rank=2))
    assert valid_schedule is not None
    arrays, order = valid_schedule
    switches = sum(arrays.rank[one] != arrays.rank[other] for one, other in pairwise(order))
    assert sorted(order) == list(range(len(order)))
    assert switches < len(order) / 2
