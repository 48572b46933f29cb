"""List scheduling: no rank is filled with what cannot end."""

from __future__ import annotations

from random import Random

import pytest

from penstock.schedule import Costs, Placement, loop, wave
from penstock.schedule.search.evaluate import fits

# one policy as the search draws it
from penstock.schedule.search.listing import _drawn, follow, reserves
from penstock.schedule.search.problem import problem


@pytest.mark.parametrize("limit", [2.0, 2.5, 3.0, 4.0])
@pytest.mark.parametrize("placement", [wave(3), loop(3, 2)], ids=["v", "loop"])
def test_list_scheduling_never_fills_a_rank_with_what_cannot_end(placement: Placement, limit: float) -> None:
    random = Random(0)
    tight = problem(placement, 6, Costs(1, 1.2, 0.8, communication=0.1), [limit] * 3)
    for _ in range(50):
        programs = follow(tight, _drawn(tight, random), reserves(tight))
        assert programs is not None
        assert fits(tight, programs)
