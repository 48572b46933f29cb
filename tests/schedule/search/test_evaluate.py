"""The search's own simulation against `simulate`."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.schedule import Costs, simulate

# one move of the annealing, whose times are compared
from penstock.schedule.search.anneal import _first_difference, _moved
from penstock.schedule.search.evaluate import fits, key, levels, tails, times, times_after
from penstock.schedule.search.problem import Problem
from support.problems import problems, some


@settings(max_examples=40, deadline=None)
@given(problems(), st.integers(0, 10))
def test_times_and_memory_are_those_of_simulate_and_tails_reach_the_end(
    drawn: tuple[Problem, Costs], seed: int
) -> None:
    given, costs = drawn
    programs = some(given, seed)
    timeline = simulate(given.schedule("searched", programs), costs)
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
            simulate(given.schedule("searched", programs))  # and so it is a right schedule
            assert fits(given, programs)
