from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble

from penstock.errors import ConfigError
from penstock.schedule import Costs, Schedule, render, simulate, verify
from penstock.schedule.builders.conformance import check_builder
from penstock.schedule.builders.v_schedules import v_half, v_min, zb_v
from penstock.schedule.ops import wave
from support.orders import grid, torch_order

SIZES = [
    (ranks, microbatches) for ranks in range(1, 9) for microbatches in (*range(1, 2 * ranks + 3), 4 * ranks)
]


def peak(ranks: int, microbatches: int, rank: int) -> int:
    return min(2 * ranks, 2 * microbatches, microbatches + 1 + rank)


def test_zb_v_golden() -> None:
    expected = """
        rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 0I1 3W2 0I2 0W1 0W2 .
        rank 1 | .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 1I1 2I2 1I2 2W1 1W1 2W2 1W2
        """
    assert grid(render(zb_v(2, 3))) == grid(expected)


def test_zb_v_conforms() -> None:
    check_builder(zb_v, ranks=range(1, 7), microbatches=range(1, 14), placement=wave, peak_live=peak)


def test_zb_v_conforms_where_formed_for_costs() -> None:
    check_builder(
        zb_v, ranks=range(1, 4), microbatches=(1, 2, 5), placement=wave, costs=Costs(1, 1.5, 0.5, 0.1)
    )


def test_the_only_bubble_is_at_both_ends() -> None:
    for ranks, microbatches in SIZES:
        timeline = simulate(zb_v(ranks, microbatches))
        if microbatches >= ranks:
            assert timeline.makespan == 6 * microbatches + ranks - 1
            assert timeline.bubble == pytest.approx((ranks - 1) / (6 * microbatches + ranks - 1))
        if microbatches >= 2 * ranks - 1:
            assert timeline.inner_bubble == pytest.approx(0)


def test_neither_slower_than_torch_nor_larger() -> None:
    for ranks, microbatches in SIZES:
        ours = simulate(zb_v(ranks, microbatches))
        torchs = simulate(torch_order(ScheduleZBVZeroBubble, ranks, microbatches))
        assert ours.makespan <= torchs.makespan
        assert all(a <= b for a, b in zip(ours.peak_live, torchs.peak_live, strict=True))
        if 1 < microbatches < ranks:
            assert ours.makespan < torchs.makespan


lengths = st.floats(0.1, 3)


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 4), st.integers(1, 10), st.data())
def test_zb_v_formed_for_costs_it_is_never_slower_nor_larger(
    ranks: int, microbatches: int, data: st.DataObject
) -> None:
    each = st.lists(lengths, min_size=2 * ranks, max_size=2 * ranks)
    costs = Costs(data.draw(each), data.draw(each), data.draw(each), data.draw(st.floats(0, 0.5)))
    formed = zb_v(ranks, microbatches, costs)
    assert simulate(formed, costs).makespan <= simulate(zb_v(ranks, microbatches), costs).makespan * (
        1 + 1e-9
    )
    for rank, live in enumerate(verify(formed).peak_live):
        assert live <= peak(ranks, microbatches, rank)


def test_zb_v_it_gains_where_the_lengths_differ() -> None:
    costs = Costs(forward=1, input_grad=1.2, weight_grad=0.6, communication=0.1)
    assert simulate(zb_v(4, 8, costs), costs).makespan < simulate(zb_v(4, 8), costs).makespan


def test_zb_v_costs_of_another_number_of_stages_are_refused() -> None:
    with pytest.raises(ConfigError, match="the schedule has 8 stages"):
        zb_v(4, 8, Costs(forward=[1, 1, 1, 1]))


class Case(NamedTuple):
    """excess: beyond the least time of any V schedule that keeps all ranks busy

    share: of 1F1B's memory, 2P of these stages; slack: how many more at most
    """

    build: Callable[..., Schedule]
    peak: Callable[[int, int], int]  # ranks, microbatches
    excess: Callable[[int], int]  # ranks
    share: float
    slack: int
    golden: str


CASES = (
    Case(
        v_half,
        lambda ranks, microbatches: min(2 * microbatches, 2 * (ranks // 2) + 2),
        lambda ranks: max(0, 2 * ranks - (3 if ranks % 2 else 6)),
        1 / 2,
        2,
        """
        rank 0 | 0F0 0F1 .   3F0 3I0 3F1 3W0 0F2 0I0 3I1 0W0 3F2 3I2 0I1 3W1 0I2 3W2 0W1 0W2
        rank 1 | .   1F0 2F0 1F1 2F1 2I0 1I0 2W0 1F2 1W0 2F2 2I1 1I1 2I2 1I2 2W1 1W1 2W2 1W2
        """,
    ),
    Case(
        v_min,
        lambda ranks, microbatches: min(2 * microbatches, 2 * ((ranks + 1) // 3) + 2),
        lambda ranks: max(0, 3 * ranks - (6, 4, 8)[ranks % 3]),
        1 / 3,
        3,
        """
        rank 0 | 0F0 0F1 .   3F0 3I0 3F1 3I1 0I0 3W0 0F2 0I1 3W1 0W0 3F2 3I2 0W1 3W2 0I2 0W2
        rank 1 | .   1F0 2F0 1F1 2F1 2I0 1I0 2I1 1I1 2W0 1F2 1W0 2F2 2W1 1W1 2I2 1I2 2W2 1W2
        """,
    ),
)


each = pytest.mark.parametrize("case", CASES, ids=lambda case: case.build.__name__)


@each
def test_v_half_v_min_golden(case: Case) -> None:
    assert grid(render(case.build(2, 3))) == grid(case.golden)


@each
def test_v_half_v_min_conforms(case: Case) -> None:
    check_builder(case.build, ranks=range(1, 7), microbatches=range(1, 14), placement=wave)


@each
def test_live_activations(case: Case) -> None:
    """Never above the bound, and from m = P on at the bound on every rank."""
    for ranks in range(1, 9):
        for microbatches in range(1, 2 * ranks + 3):
            live = verify(case.build(ranks, microbatches)).peak_live
            assert max(live) <= case.peak(ranks, microbatches)
            if microbatches >= ranks:
                assert live == (case.peak(ranks, microbatches),) * ranks


@each
def test_v_half_v_min_conforms_where_formed_for_costs(case: Case) -> None:
    check_builder(
        case.build, ranks=range(1, 4), microbatches=(1, 2, 5), placement=wave, costs=Costs(1, 1.5, 0.5, 0.1)
    )


@each
@pytest.mark.parametrize("ranks", range(1, 13))
def test_the_bubble(case: Case, ranks: int) -> None:
    for microbatches in (ranks, ranks + 1, 2 * ranks, 3 * ranks + 1):
        timeline = simulate(case.build(ranks, microbatches))
        makespan = 6 * microbatches + ranks - 1 + case.excess(ranks)
        assert timeline.makespan == makespan
        assert timeline.bubble == pytest.approx(1 - 6 * microbatches / makespan)


@each
def test_more_microbatches_cost_only_their_work(case: Case) -> None:
    """No bubble recurs in the steady state."""
    few, many = (simulate(case.build(5, m)).makespan for m in (20, 50))
    assert many - few == 6 * 30


@each
def test_it_holds_its_share_of_what_1f1b_does(case: Case) -> None:
    for ranks in range(1, 65):
        share = 2 * ranks * case.share
        assert share - 1e-9 <= case.peak(ranks, 999) <= share + case.slack + 1e-9


def drawn_costs(data: st.DataObject, ranks: int, microbatches: int) -> Costs:
    """A number, a number a stage, or a row of microbatches a stage."""
    row = st.lists(lengths, min_size=microbatches, max_size=microbatches)
    each = st.lists(st.one_of(lengths, row), min_size=2 * ranks, max_size=2 * ranks)
    cost = st.one_of(lengths, each)
    return Costs(data.draw(cost), data.draw(cost), data.draw(cost), data.draw(st.floats(0, 1)))


@each
@settings(max_examples=15, deadline=None)
@given(ranks=st.integers(1, 5), microbatches=st.integers(1, 12), data=st.data())
def test_v_half_v_min_formed_for_costs_it_is_never_slower_nor_larger(
    case: Case, ranks: int, microbatches: int, data: st.DataObject
) -> None:
    costs = drawn_costs(data, ranks, microbatches)
    usual, formed = case.build(ranks, microbatches), case.build(ranks, microbatches, costs)
    assert simulate(formed, costs).makespan <= simulate(usual, costs).makespan * (1 + 1e-9)
    assert max(verify(formed).peak_live) <= case.peak(ranks, microbatches)


@each
@pytest.mark.parametrize(
    "costs",
    [
        Costs(forward=1, input_grad=1.2, weight_grad=0.6, communication=0.2),
        Costs(forward=1, input_grad=2, weight_grad=0.3),
        Costs([0.5, 1, 1, 1, 1, 1, 1, 1.6], [0.5, 1, 1, 1, 1, 1, 1, 1.6], 1),
    ],
)
def test_v_half_v_min_it_gains_where_the_lengths_differ(case: Case, costs: Costs) -> None:
    usual, formed = case.build(4, 12), case.build(4, 12, costs)
    assert simulate(formed, costs).makespan < 1 * simulate(usual, costs).makespan


@each
@pytest.mark.parametrize("forward", [[1.0] * 4, [1.0] * 9])
def test_v_half_v_min_costs_of_another_number_of_stages_are_refused(
    case: Case, forward: Sequence[float]
) -> None:
    with pytest.raises(ConfigError, match="the schedule has 8 stages"):
        case.build(4, 8, Costs(forward=forward))


@each
def test_costs_of_nothing_at_all(case: Case) -> None:
    verify(case.build(3, 4, Costs(0, 0, 0)))
