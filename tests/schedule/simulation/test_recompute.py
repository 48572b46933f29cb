"""Which forwards are run again, and how few of them a limit on memory asks for."""

from __future__ import annotations

from math import nan
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.schedule import Costs, Schedule, build, simulate
from penstock.schedule.simulation.recompute import counts_within, first_in_flight, mixed
from support.programs import valid
from support.refusals import refuses

KEPT, INPUTS = Costs(activation=4), Costs(activation=0.5)


def microbatches(schedule: Schedule, counts: Any, stage: int) -> list[int]:
    return sorted(i for s, i in first_in_flight(schedule, counts) if s == stage)


def test_the_first_in_flight_are_run_again() -> None:
    """1F1B, rank 0 of 3: F0 F1 F2 B0 F3 B1 F4 B2 F5 ..., of which two at a time."""
    schedule = build("1f1b", ranks=3, microbatches=6)
    assert microbatches(schedule, 2, stage=0) == [0, 1, 3, 4]
    assert microbatches(schedule, 1, stage=0) == [0, 3]
    assert microbatches(schedule, (1, 0, 1), stage=1) == []
    assert microbatches(schedule, (1, 0, 1), stage=2) == [0, 1, 2, 3, 4, 5]
    assert microbatches(schedule, None, stage=0) == microbatches(schedule, 99, stage=0) == [*range(6)]
    assert first_in_flight(schedule, 0) == frozenset()


def test_a_split_backward_is_live_to_the_end_of_its_weight_gradient() -> None:
    """Rank 0 of 2: F0 F1 I0 W0 F2 ..., and rank 1: F0 I0 F1 I1 W0 F2 ..."""
    schedule = build("zb_h1", ranks=2, microbatches=4)
    assert microbatches(schedule, 1, stage=0) == [0, 2]
    assert microbatches(schedule, 1, stage=1) == [0, 2]


def test_nothing_is_run_again_where_there_is_no_backward() -> None:
    assert first_in_flight(build("inference", ranks=2, microbatches=3), None) == frozenset()


@pytest.mark.parametrize("counts", [-1, (1, 2, 3), (1, -1), (1, 0.5), True])
def test_what_is_no_count_is_refused(counts: Any) -> None:
    with refuses(ConfigError, "count"):
        first_in_flight(build("1f1b", ranks=2, microbatches=3), counts)


@settings(max_examples=60, deadline=None)
@given(valid(always_trains=True), st.integers(0, 4))
def test_an_op_is_run_again_exactly_if_few_enough_are_live(schedule: Schedule, count: int) -> None:
    """One more only adds, which is why halving finds the least."""
    chosen = first_in_flight(schedule, count)
    assert chosen <= first_in_flight(schedule, count + 1)
    for program in schedule.programs:
        for at, op in enumerate(program):
            if op.kind == "F":
                places = [(o.stage, o.microbatch) for o in program[:at] if o.kind == "F"]
                ended = [(o.stage, o.microbatch) for o in program[:at] if o.kind in "BW"]
                live = [place for place in places if place not in ended and place in chosen]
                assert ((op.stage, op.microbatch) in chosen) == (len(live) < count)


def test_mixed_costs() -> None:
    schedule = build("1f1b", ranks=2, microbatches=2)
    kept = Costs([1, 2], 3, 1, activation=4, held_for_weight=3, communication=0.5)
    costs = mixed(schedule, kept, Costs(activation=0.5), frozenset({(0, 1)}))
    assert costs == Costs(
        [1, 2], [[3, 4], [3, 3]], 1, activation=[[4, 0.5], [4, 4]], held_for_weight=[[3, 3], [3, 3]],
        held_in_backward=[[4, 4], [4, 4]], communication=0.5,
    )  # fmt: skip
    layerwise = Costs(activation=0.5, held_in_backward=1, held_for_weight=0.75)
    costs = mixed(schedule, kept, layerwise, frozenset({(1, 0)}))
    assert costs.held_in_backward == [[4, 4], [1, 4]]
    assert costs.held_for_weight == [[3, 3], [0.75, 3]]


def test_counts_by_hand() -> None:
    """1F1B on four ranks holds 4, 3, 2 and 1 of them. The one whose backward runs is whole in any case."""
    schedule = build("1f1b", ranks=4, microbatches=8)
    assert counts_within(schedule, KEPT, INPUTS, 16) == (0, 0, 0, 0)
    assert counts_within(schedule, KEPT, INPUTS, 12.5) == (2, 0, 0, 0)
    assert counts_within(schedule, KEPT, INPUTS, 5.5) == (4, 3, 2, 0)
    assert counts_within(schedule, KEPT, INPUTS, (16, 12, 5, 4)) == (0, 0, 2, 0)


def test_too_small_a_limit_names_the_ranks_and_what_they_would_hold() -> None:
    schedule = build("1f1b", ranks=4, microbatches=8)
    with pytest.raises(ConfigError) as caught:
        counts_within(schedule, KEPT, INPUTS, (16, 4.5, 4.5, 3.5))
    assert caught.value.value == "a memory limit of 3.5, 4.5, 16"
    assert caught.value.rule == (
        "with every forward run again rank 1 would hold 5 of 4.5, rank 3 would hold 4 of 3.5"
    )
    assert "smaller microbatches" in caught.value.remedy


@pytest.mark.parametrize("limit", [-1.0, nan, (1.0,), (1.0, 2.0, 3.0)])
def test_what_is_no_limit_is_refused(limit: Any) -> None:
    with refuses(ConfigError, "limit"):
        counts_within(build("1f1b", ranks=2, microbatches=3), KEPT, INPUTS, limit)


sizes = st.sampled_from([0.0, 0.5, 1.0, 3.0])


@settings(max_examples=40, deadline=None)
@given(valid(always_trains=True), sizes, sizes, st.floats(0, 30))
def test_the_least_that_fits(schedule: Schedule, inputs: float, kept_more: float, limit: float) -> None:
    kept, recomputed = Costs(activation=inputs + kept_more), Costs(activation=inputs)

    def peaks(counts: Any) -> tuple[float, ...]:
        costs = mixed(schedule, kept, recomputed, first_in_flight(schedule, counts))
        return simulate(schedule, costs).peak_memory

    try:
        counts = counts_within(schedule, kept, recomputed, limit)
    except ConfigError:
        assert max(peaks(None)) > limit
        return
    assert max(peaks(counts)) <= limit * (1 + 1e-9)
    for rank, count in enumerate(counts):
        if count:
            fewer = [n - (r == rank) for r, n in enumerate(counts)]
            assert peaks(fewer)[rank] > limit


@settings(max_examples=25, deadline=None)
@given(valid(always_trains=True), st.floats(0, 30))
def test_with_buffers_it_fits_all_the_same(schedule: Schedule, limit: float) -> None:
    kept, recomputed = Costs(1, 1.3, 0.7, 0.4, activation=3, buffer=1), Costs(activation=1)
    try:
        counts = counts_within(schedule, kept, recomputed, limit)
    except ConfigError:
        assume(False)
    costs = mixed(schedule, kept, recomputed, first_in_flight(schedule, counts))
    assert max(simulate(schedule, costs).peak_memory) <= limit * (1 + 1e-9)


def test_what_runs_again_takes_less_where_results_were_kept() -> None:
    schedule = build("1f1b", ranks=1, microbatches=2)
    for again, taken in ((None, 1 + 2), (0.25, 1 + 0.25)):
        kept, inputs = Costs(forward=2, recomputed=again), Costs(activation=0.5, held_in_forward=0.75)
        costs = mixed(schedule, kept, inputs, frozenset({(0, 1)}))
        assert costs.input_grad == [[1, taken]]
        assert costs.held_in_forward == [[1, 0.75]]
