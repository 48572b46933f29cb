import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble

from penstock.errors import ConfigError
from penstock.schedule import Costs, render, simulate, verify
from penstock.schedule.builders.conformance import check_builder
from penstock.schedule.builders.v_schedules import zb_v
from penstock.schedule.ops import wave
from support.orders import grid, torch_order

SIZES = [
    (ranks, microbatches) for ranks in range(1, 9) for microbatches in (*range(1, 2 * ranks + 3), 4 * ranks)
]


def peak(ranks: int, microbatches: int, rank: int) -> int:
    return min(2 * ranks, 2 * microbatches, microbatches + 1 + rank)


def test_golden() -> None:
    expected = """
        rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 0I1 3W2 0I2 0W1 0W2 .
        rank 1 | .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 1I1 2I2 1I2 2W1 1W1 2W2 1W2
        """
    assert grid(render(zb_v(2, 3))) == grid(expected)


def test_conforms() -> None:
    check_builder(zb_v, ranks=range(1, 7), microbatches=range(1, 14), placement=wave, peak_live=peak)


def test_conforms_where_formed_for_costs() -> None:
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
def test_formed_for_costs_it_is_never_slower_nor_larger(
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


def test_it_gains_where_the_lengths_differ() -> None:
    costs = Costs(forward=1, input_grad=1.2, weight_grad=0.6, communication=0.1)
    assert simulate(zb_v(4, 8, costs), costs).makespan < simulate(zb_v(4, 8), costs).makespan


def test_costs_of_another_number_of_stages_are_refused() -> None:
    with pytest.raises(ConfigError, match="the schedule has 8 stages"):
        zb_v(4, 8, Costs(forward=[1, 1, 1, 1]))
