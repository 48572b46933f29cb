from __future__ import annotations

import sys
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.schedule import Costs, Placement, both_ways, loop, simulate, verify, wave
from penstock.schedule.builders import BUILDERS
from penstock.schedule.search import Found, search
from penstock.schedule.search import exact as cp_sat
from penstock.schedule.search.evaluate import Best
from penstock.schedule.search.listing import list_schedules
from penstock.schedule.search.problem import Budget, problem
from penstock.schedule.search.search import extend
from penstock.schedule.simulation.timeline import Objective
from support.covering import every


@pytest.fixture(params=[True, False], ids=["ortools", "plain"])
def with_and_without_ortools(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.param:
        monkeypatch.setitem(sys.modules, "ortools", None)  # as if it were not installed
        monkeypatch.setattr(cp_sat, "solve", None)


def holds(found: Found, limit: float | Sequence[float] | None) -> bool:
    limits = [limit] * found.schedule.ranks if limit is None or isinstance(limit, int | float) else limit
    pairs = zip(found.timeline.peak_memory, limits, strict=True)
    return all(limit is None or peak <= limit + 1e-9 for peak, limit in pairs)


@pytest.mark.sweep
def test_a_v_with_room_for_half_as_much_again_has_hardly_a_bubble() -> None:
    costs = Costs(1, 1.2, 0.8, communication=0.1)
    built = simulate(BUILDERS["zb_v"](ranks=4, microbatches=8), costs)
    found = search(
        ranks=4, microbatches=8, costs=costs, memory_limit=12, placement="v", objective="extent", seconds=0.2
    )
    assert holds(found, 12)
    assert found.timeline.inner_bubble < built.inner_bubble / 4


def test_the_limit_is_on_activations_alone() -> None:
    plain, more = Costs(communication=0.1), Costs(communication=0.1, buffer=9, held_in_backward=7)
    one, other = (
        search(ranks=2, microbatches=3, costs=c, memory_limit=2, seconds=0.2) for c in (plain, more)
    )
    assert (one.schedule, one.timeline) == (other.schedule, other.timeline)


# an embedding in front and a head behind: the last rank never waits once it has begun
WORK = [1.3, 1.0, 1.0, 1.8]
UNEQUAL = Costs(WORK, WORK, WORK)


@pytest.mark.parametrize(
    ("options", "value"),
    [
        # room for 9 forwards on rank 0, whose first I comes at 11 at the earliest: it idles 2, no other rank
        pytest.param(
            {"ranks": 6, "microbatches": 12, "memory_limit": 9, "objective": "extent"},
            3 * 12 + 2,
            marks=pytest.mark.sweep,
        ),
        ({"ranks": 4, "microbatches": 8, "memory_limit": 2}, 41),  # less than any builder needs
        ({"ranks": 4, "microbatches": 8, "memory_limit": 4, "costs": UNEQUAL}, 3.3 + 8 * 3 * 1.8),
    ],
    ids=["room for half as many again", "below the memory of 1f1b", "unequal stages"],
)
def test_known_optima_are_found_and_proven(options: dict[str, Any], value: float) -> None:
    found = search(**options, seconds=0.2)
    assert found.optimal
    assert found.value == pytest.approx(value)
    assert found.lower_bound == pytest.approx(value)
    assert holds(found, options["memory_limit"])
    assert (found.best_builder is None) == (options["memory_limit"] == 2)


def test_microbatches_that_differ_may_change_places() -> None:
    costs = Costs(forward=[[3, 1, 1, 2]] * 3, input_grad=[[3, 1, 1, 2]] * 3, weight_grad=0.5)
    found = search(ranks=3, microbatches=4, costs=costs, memory_limit=3, seconds=0.2)
    built = min(
        simulate(BUILDERS[name](ranks=3, microbatches=4), costs).makespan for name in ("1f1b", "zb_h1")
    )
    assert found.lower_bound <= found.makespan < built
    assert verify(found.schedule)


def test_the_makespan_counts_first_and_the_ends_next() -> None:
    """zb_h1 and zb_h2 end alike; with room for zb_h2 no rank but the last two need wait inside."""
    found = search(ranks=4, microbatches=8, memory_limit=7, seconds=0.2)
    assert found.makespan == simulate(BUILDERS["zb_h1"](ranks=4, microbatches=8)).makespan
    assert found.timeline.inner_bubble == pytest.approx(0)


@pytest.mark.parametrize(
    "placement", every(3, [both_ways(4), wave(2), loop(2, 2), Placement((0, 1, 1, 0, 0, 1))]), ids=str
)
def test_any_placement(placement: Placement) -> None:
    found = search(ranks=placement.ranks, microbatches=4, placement=placement, memory_limit=8, seconds=0.3)
    assert found.schedule.placement == placement
    assert holds(found, 8)


@pytest.mark.usefixtures("with_and_without_ortools")
def test_the_same_seed_gives_the_same() -> None:
    costs = Costs(1, 1.3, 0.7, communication=0.2)
    one, same = (
        search(ranks=3, microbatches=5, costs=costs, memory_limit=8, placement="v", seconds=0.05, seed=1)
        for _ in range(2)
    )
    assert not one.cut_short
    assert one == same


@pytest.mark.usefixtures("with_and_without_ortools")
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_never_worse_than_a_builder_and_within_the_limit(data: st.DataObject) -> None:
    ranks, microbatches = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    placement = data.draw(st.sampled_from(["loop", "v"]))
    stages = ranks * (2 if placement == "v" else 1)
    time = st.sampled_from([0.0, 0.1, 1 / 3, 0.5, 1.0, 1.7])
    times = [data.draw(st.lists(time, min_size=stages, max_size=stages)) for _ in range(3)]
    kept = data.draw(st.sampled_from([None, 0.0, 0.3, 1.0]))
    costs = Costs(times[0], times[1], times[2], data.draw(time), held_for_weight=kept)
    limit = data.draw(st.sampled_from([None, 2.0, 2.5, ranks * 1.5 + 1.0, 2.0 * ranks]))
    objective: Objective = data.draw(st.sampled_from(["makespan", "extent"]))
    found = search(
        ranks=ranks, microbatches=microbatches, costs=costs, memory_limit=limit, placement=placement,
        objective=objective, seconds=0.05,
    )  # fmt: skip
    verify(found.schedule)
    assert holds(found, limit)
    assert found.lower_bound <= found.value
    assert found.builder_value is None or found.value <= found.builder_value
    assert found.timeline == simulate(found.schedule, costs)
    if limit is None and objective == "makespan":
        gpipe = BUILDERS["gpipe"](ranks=ranks, microbatches=microbatches)
        assert placement == "v" or found.makespan <= simulate(gpipe, costs).makespan + 1e-9


def test_a_whole_backward_where_nothing_waits_for_its_first_half() -> None:
    """The first stage's gradient goes nowhere."""
    found = search(ranks=2, microbatches=3, seconds=0.1)
    kinds = {op.kind for op in found.schedule.programs[0]}
    assert kinds >= {"B"}
    assert "B" not in {op.kind for op in found.schedule.programs[1][:-2]}


@pytest.mark.parametrize(
    ("options", "value", "least"),
    [
        ({"memory_limit": 0.5}, "memory_limit=0.5", "1"),
        ({"memory_limit": [3, 1.5], "placement": "v"}, "memory_limit=[3, 1.5]", "2 on rank 1"),
        ({"memory_limit": 2, "costs": Costs(activation=[1, 2.5])}, "memory_limit=2", "2.5"),
    ],
)
def test_an_impossible_limit_names_the_least(options: dict[str, Any], value: str, least: str) -> None:
    with pytest.raises(ConfigError) as caught:
        search(ranks=2, microbatches=3, seconds=0.1, **options)
    assert caught.value.value == value
    assert caught.value.remedy == f"Give {least} or more"


@pytest.mark.parametrize(
    "options",
    [
        {"ranks": 0}, {"microbatches": 0}, {"seconds": 0}, {"seconds": float("nan")}, {"placement": "w"},
        {"memory_limit": [1.0]}, {"memory_limit": -1}, {"memory_limit": float("nan")}, {"objective": "speed"},
        {"placement": wave(3)}, {"stages_per_rank": 0}, {"costs": Costs(forward=[1, 2, 3])},
    ],
    ids=str,
)  # fmt: skip
def test_what_makes_no_sense_is_an_error(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        search(**{"ranks": 2, "microbatches": 2, "seconds": 0.1, **options})


def test_pairs_that_hide_an_exchange_are_the_answer_and_the_bound_knows_them() -> None:
    """0.5.0: the bound was that of ops one after the other, which pairs go below."""
    costs = Costs(4, 6, 2, exchange=2, exchange_in_backward=4)
    found = search(ranks=2, microbatches=8, costs=costs, seconds=0.2)
    assert found.best_builder == "1f1b paired"
    assert found.schedule.overlaps
    assert found.value == found.makespan == found.builder_value
    assert not found.optimal
    # each rank computes 2 + 4 of every microbatch's 12
    assert 8 * 6 <= found.lower_bound < found.value < 8 * 12


@pytest.mark.parametrize(
    ("backward", "objective"),  # 8: of all of a whole backward
    every(
        2, [(0, "makespan"), (0, "extent"), (3, "extent"), (3, "makespan"), (8, "makespan"), (8, "extent")]
    ),
)
def test_no_pair_is_faster_than_the_bound(objective: Objective, backward: float) -> None:
    costs = Costs(4, 6, 2, 0.5, exchange=4, exchange_in_backward=backward)
    found = search(ranks=2, microbatches=4, costs=costs, placement="v", objective=objective, seconds=0.3)
    for name in ("dualpipe_v", "zb_v"):
        built = simulate(BUILDERS[name](ranks=2, microbatches=4), costs)
        assert found.lower_bound <= built.makespan
    assert found.lower_bound <= found.value


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
