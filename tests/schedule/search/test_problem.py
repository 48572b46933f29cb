"""A problem of the search is in whole numbers."""

from __future__ import annotations

import pytest

from penstock.schedule import Costs, loop
from penstock.schedule.op_arrays import NOTHING
from penstock.schedule.search.problem import problem


def test_whole_numbers_of_what_people_write() -> None:
    given = problem(loop(2), 2, Costs(0.1, 1.25, 1 / 8, communication=0.3), [2.5, None])
    assert given.quantum == pytest.approx(1 / 40)
    assert given.duration[:3] == [4, 50, 5]
    odd = problem(loop(2), 2, Costs(0.1, 2**0.5), [None, None])
    assert odd.duration[1] * odd.quantum <= 2**0.5
    assert given.need[0] == NOTHING
