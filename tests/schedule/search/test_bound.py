"""Lower bounds: no schedule is faster, and some reach them; test_exact.py tries every schedule."""

from __future__ import annotations

import pytest

from penstock.schedule import Costs, Placement, build, loop, simulate, wave
from penstock.schedule.search.bound import lower_bound
from penstock.schedule.search.problem import problem


def bound(
    placement: Placement, microbatches: int, costs: Costs | None = None, limit: float | None = None
) -> float:
    given = problem(placement, microbatches, costs or Costs(), [limit] * placement.ranks)
    return lower_bound(given) * given.quantum


def test_one_rank_is_busy_all_the_time() -> None:
    assert bound(loop(1), 4, Costs(1, 2, 0.5)) == pytest.approx(4 * 3.5)


def test_one_microbatch_goes_there_and_back() -> None:
    """Three ranks, edges of 0.5: F F F, I I I and the W of stage 0."""
    assert bound(loop(3), 1, Costs(communication=0.5)) == 3 + 3 + 1 + 4 * 0.5


def test_a_smaller_limit_never_lowers_the_bound() -> None:
    bounds = [bound(loop(4), 8, Costs(), limit) for limit in (1, 2, 3, 4, 8)]
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[0] > bounds[-1]


@pytest.mark.parametrize("costs", [Costs(), Costs(1, 2, 0.5, communication=0.25)])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_h1", "zb_h2"])
def test_no_schedule_is_faster(name: str, costs: Costs) -> None:
    schedule = build(name, ranks=4, microbatches=8)
    assert bound(schedule.placement, 8, costs) <= simulate(schedule, costs).makespan


def test_copies_of_a_model_share_the_work() -> None:
    schedule = build("dualpipe", ranks=4, microbatches=8)
    given = problem(schedule.placement, 8, Costs(), [None] * 4)
    assert 8 * 3 <= lower_bound(given) * given.quantum <= simulate(schedule, Costs()).makespan


def test_a_wave_has_the_work_of_two_stages() -> None:
    assert bound(wave(2), 4) >= 2 * 4 * 3
