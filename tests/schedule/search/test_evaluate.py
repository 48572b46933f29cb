"""The search's own simulation against `simulate`."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from penstock.schedule import Costs, Placement, loop, simulate, wave
from penstock.schedule.op_arrays import NOTHING
from penstock.schedule.search.anneal import _first_difference, _moved, replaced
from penstock.schedule.search.evaluate import Best, fits, key, levels, tails, times, times_after
from penstock.schedule.search.listing import _drawn, follow, list_schedules, reserves
from penstock.schedule.search.problem import Budget, Problem, Programs, problem
from penstock.schedule.search.repeat import extend, fewer

number = st.sampled_from([0.0, 0.1, 0.5, 1.0, 1.7])


@st.composite
def problems(draw: st.DrawFn) -> tuple[Problem, Costs]:
    ranks, microbatches = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    placement = draw(st.sampled_from([loop(ranks), wave(ranks), loop(ranks, 2)]))
    stages = placement.stages
    times = [draw(st.lists(number, min_size=stages, max_size=stages)) for _ in range(3)]
    kept = draw(st.sampled_from([None, 0.0, 0.4, 1.3]))
    costs = Costs(times[0], times[1], times[2], draw(number), held_for_weight=kept)
    limit = draw(st.sampled_from([None, 2.6, 3.0, 2.0 * ranks + 1]))
    return problem(placement, microbatches, costs, [limit] * ranks, None, draw(st.booleans())), costs


def some(given: Problem, seed: int) -> Programs:
    """What some policy leads to. Where W holds more than F did it may find that nothing fits."""
    found = follow(given, _drawn(given, Random(seed)), reserves(given))
    assume(found is not None)
    assert found is not None
    return found


@settings(max_examples=40, deadline=None)
@given(problems(), st.integers(0, 10))
def test_times_and_memory_are_those_of_simulate_and_tails_reach_the_end(
    drawn: tuple[Problem, Costs], seed: int
) -> None:
    given, costs = drawn
    programs = some(given, seed)
    timeline = simulate(given.schedule(programs), costs)
    ends = times(given, programs)
    assert ends is not None
    for span in timeline.spans:
        at = span.op.stage * given.row + 3 * span.op.microbatch + "FIW".index(span.op.kind)
        assert ends[at] * given.quantum == pytest.approx(span.end)
    after = tails(given, programs)
    longest = max(ends[number] + after[number] for program in programs for number in program)
    assert longest == key(given, programs, ends).value
    for rank, program in enumerate(programs):
        # read off the first activation, which is 1; ops that take no time are one moment to `simulate`
        held = max(levels(given, program)) / given.take[0]
        assert held >= timeline.peak_memory[rank] - 1e-9
        if all(given.duration[n] for n in program):
            assert held == pytest.approx(timeline.peak_memory[rank])


@settings(max_examples=40, deadline=None)
@given(problems(), st.integers(0, 10), st.data())
def test_a_move_is_timed_from_where_it_begins(
    drawn: tuple[Problem, Costs], seed: int, data: st.DataObject
) -> None:
    given, _ = drawn
    programs = some(given, seed)
    for _ in range(8):
        before = times(given, programs)
        assert before is not None
        rank = data.draw(st.integers(0, given.ranks - 1))
        program = programs[rank]
        at, to = (data.draw(st.integers(0, len(program) - 1)) for _ in range(2))
        moved = _moved(given, program, at, to)
        if moved is None:
            continue
        programs[rank] = moved
        since = _first_difference(program, moved, min(at, to))
        anew = times(given, programs)
        assert times_after(given, programs, before, rank, since) == anew
        if anew is None:
            programs[rank] = program
        else:
            simulate(given.schedule(programs))  # and so it is a right schedule
            assert fits(given, programs)


@settings(max_examples=40, deadline=None)
@given(problems(), st.integers(0, 10))
def test_replaced_weights_leave_a_right_schedule(drawn: tuple[Problem, Costs], seed: int) -> None:
    given, costs = drawn
    programs = some(given, seed)
    found = replaced(given, programs)
    if found is None:
        return
    assert fits(given, found)
    simulate(given.schedule(found), costs)
    for new, old in zip(found, programs, strict=True):
        assert [n for n in new if n % 3 < 2] == [n for n in old if n % 3 < 2]


@pytest.mark.parametrize(("placement", "limit"), [(loop(4), 6.0), (wave(4), 12.0)], ids=["loop", "v"])
def test_a_steady_state_is_repeated(placement: Placement, limit: float) -> None:
    costs = Costs(1, 1.2, 0.8, communication=0.1)
    many = problem(placement, 40, costs, [limit] * 4)
    few = fewer(many, 10)
    assert few == problem(placement, 10, costs, [limit] * 4)
    small = Best(few, Random(0), Budget(0.5), least=0)
    list_schedules(small, 1.0)
    found = Best(many, Random(0), Budget(1), least=0)
    extend(found, small)
    # a busy rank has no bubble but that of the small schedule
    assert found.key.value <= small.key.value + 30 * many.cycle * 1.01
    simulate(many.schedule(found.programs), costs)


@pytest.mark.parametrize("limit", [2.0, 2.5, 3.0, 4.0])
@pytest.mark.parametrize("placement", [wave(3), loop(3, 2)], ids=["v", "loop"])
def test_list_scheduling_never_fills_a_rank_with_what_cannot_end(placement: Placement, limit: float) -> None:
    random = Random(0)
    tight = problem(placement, 6, Costs(1, 1.2, 0.8, communication=0.1), [limit] * 3)
    for _ in range(50):
        programs = follow(tight, _drawn(tight, random), reserves(tight))
        assert programs is not None
        assert fits(tight, programs)


def test_whole_numbers_of_what_people_write() -> None:
    given = problem(loop(2), 2, Costs(0.1, 1.25, 1 / 8, communication=0.3), [2.5, None])
    assert given.quantum == pytest.approx(1 / 40)
    assert given.duration[:3] == [4, 50, 5]
    odd = problem(loop(2), 2, Costs(0.1, 2**0.5), [None, None])
    assert odd.duration[1] * odd.quantum <= 2**0.5
    assert given.need[0] == NOTHING
