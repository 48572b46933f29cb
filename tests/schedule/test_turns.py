"""The ends of all ops, against one op at a time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.schedule import Costs, Op, Pair, Schedule, loop, simulate, verify
from penstock.schedule.turns import Turns, last_gradients
from support.programs import paired, valid, written

any_number = st.floats(0, 3, allow_nan=False)


def test_a_reduction_is_a_turn_of_its_own() -> None:
    proof = verify(written(loop(1, 2), 1, "0F0 1F0 1B0 0B0"))
    reduced = last_gradients(proof.arrays)
    assert reduced == {1: 2, 0: 3}
    turns = Turns.of(proof.arrays, proof.order, np.zeros(4), reduced=reduced.values())
    assert turns.op.tolist() == [0, 1, 2, 2, 3, 3]
    assert turns.reduces.tolist() == [False, False, False, True, False, True]
    assert turns.before.tolist() == [0, 1, 2, 3, 4, 5]
    assert turns.needed.tolist() == [0, 1, 0, 0, 3, 0]  # 0B0 takes the gradient at the end of 1B0, not of R1


@settings(max_examples=80, deadline=None)
@given(st.one_of(valid(), paired()), st.lists(any_number, min_size=6, max_size=6), st.booleans())
def test_times_are_to_the_last_digit_those_of_one_op_after_another(
    schedule: Schedule, numbers: list[float], exchanges: bool
) -> None:
    forward, input_grad, weight_grad, latency, *once = numbers
    costs = Costs(forward, input_grad, weight_grad, latency, gather=once[0], reduction=once[1])
    if exchanges:
        costs = replace(costs, exchange=forward / 2, exchange_in_backward=input_grad / 3)
    try:
        timeline = simulate(schedule, costs)
    except ScheduleError:
        return
    assert {span.op: (span.start, span.end) for span in timeline.spans} == slowly(schedule, costs, *once)


def slowly(
    schedule: Schedule, costs: Costs, gather: float, reduction: float
) -> dict[Op, tuple[float, float]]:
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
            if ops[0] == next(op for op in schedule.programs[rank] if op[:2] == (ops[0].stage, "F")):
                takes += gather
            if together and len(ops) == 2:
                takes = together(Pair(*ops))
            for op in ops:
                found[op] = start, start + takes
            free_at[rank] = start + takes
            last = [op for op in schedule.programs[rank] if op.stage == ops[-1].stage][-1]
            if last == ops[-1] and last.kind != "F":
                free_at[rank] += reduction
            del program[: len(ops)]
    return found
