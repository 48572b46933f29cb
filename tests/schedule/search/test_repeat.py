"""A steady state is repeated for more microbatches."""

from __future__ import annotations

from random import Random

import pytest

from penstock.schedule import Costs, Placement, loop, simulate, wave
from penstock.schedule.search.evaluate import Best
from penstock.schedule.search.listing import list_schedules
from penstock.schedule.search.problem import Budget, problem
from penstock.schedule.search.repeat import extend


@pytest.mark.parametrize(("placement", "limit"), [(loop(4), 6.0), (wave(4), 12.0)], ids=["loop", "v"])
def test_a_steady_state_is_repeated(placement: Placement, limit: float) -> None:
    costs = Costs(1, 1.2, 0.8, communication=0.1)
    many = problem(placement, 40, costs, [limit] * 4)
    few = many.first(10)
    assert few == problem(placement, 10, costs, [limit] * 4)
    small = Best(few, Random(0), Budget(0.5), least=0)
    list_schedules(small, 1.0)
    found = Best(many, Random(0), Budget(1), least=0)
    extend(found, small)
    # a busy rank has no bubble but that of the small schedule
    assert found.key.value <= small.key.value + 30 * many.cycle * 1.01
    simulate(many.schedule("searched", found.programs), costs)
