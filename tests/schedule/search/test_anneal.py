"""Annealing: what it changes leaves a right schedule."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.schedule import Costs, simulate
from penstock.schedule.search.anneal import replaced
from penstock.schedule.search.evaluate import fits
from penstock.schedule.search.problem import Problem
from support.problems import problems, some


@settings(max_examples=40, deadline=None)
@given(problems(), st.integers(0, 10))
def test_replaced_weights_leave_a_right_schedule(drawn: tuple[Problem, Costs], seed: int) -> None:
    given, costs = drawn
    programs = some(given, seed)
    found = replaced(given, programs)
    if found is None:
        return
    assert fits(given, found)
    simulate(given.schedule("searched", found), costs)
    for new, old in zip(found, programs, strict=True):
        assert [n for n in new if n % 3 < 2] == [n for n in old if n % 3 < 2]
