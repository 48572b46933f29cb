from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.schedule import Costs, render, simulate, verify
from penstock.schedule.builders.v_half import v_half
from penstock.schedule.conformance import check_builder
from penstock.schedule.placement import wave
from support.orders import drawn_and_built, grid


def peak(ranks: int, microbatches: int) -> int:
    return min(2 * microbatches, 2 * (ranks // 2) + 2)


def excess(ranks: int) -> int:
    """Beyond the least time of any V schedule that keeps all ranks busy."""
    return max(0, 2 * ranks - (3 if ranks % 2 else 6))


def test_golden() -> None:
    expected = """
        rank 0 | 0F0 0F1 .   3F0 3I0 3F1 3W0 0F2 0I0 3I1 0W0 3F2 3I2 0I1 3W1 0I2 3W2 0W1 0W2
        rank 1 | .   1F0 2F0 1F1 2F1 2I0 1I0 2W0 1F2 1W0 2F2 2I1 1I1 2I2 1I2 2W1 1W1 2W2 1W2
        """
    assert grid(render(v_half(2, 3))) == grid(expected)


def test_the_drawing_in_the_docstring_is_what_is_built() -> None:
    drawn, built = drawn_and_built(v_half)
    assert drawn == built


def test_conforms() -> None:
    check_builder(v_half, ranks=range(1, 7), microbatches=range(1, 14), placement=wave)


def test_live_activations() -> None:
    """Never above the bound, and from m = P on at the bound on every rank."""
    for ranks in range(1, 9):
        for microbatches in range(1, 2 * ranks + 3):
            live = verify(v_half(ranks, microbatches)).peak_live
            assert max(live) <= peak(ranks, microbatches)
            if microbatches >= ranks:
                assert live == (peak(ranks, microbatches),) * ranks


def test_conforms_where_formed_for_costs() -> None:
    check_builder(
        v_half, ranks=range(1, 4), microbatches=(1, 2, 5), placement=wave, costs=Costs(1, 1.5, 0.5, 0.1)
    )


@pytest.mark.parametrize("ranks", range(1, 13))
def test_the_bubble(ranks: int) -> None:
    for microbatches in (ranks, ranks + 1, 2 * ranks, 3 * ranks + 1):
        timeline = simulate(v_half(ranks, microbatches))
        makespan = 6 * microbatches + ranks - 1 + excess(ranks)
        assert timeline.makespan == makespan
        assert timeline.bubble == pytest.approx(1 - 6 * microbatches / makespan)


def test_more_microbatches_cost_only_their_work() -> None:
    """No bubble recurs in the steady state."""
    few, many = (simulate(v_half(5, m)).makespan for m in (20, 50))
    assert many - few == 6 * 30


def test_it_holds_half_of_what_1f1b_does() -> None:
    for ranks in range(1, 65):
        assert 2 * ranks / 2 <= peak(ranks, 999) <= 2 * ranks / 2 + 2


lengths = st.floats(0.1, 3)


def drawn_costs(data: st.DataObject, ranks: int, microbatches: int) -> Costs:
    """A number, a number a stage, or a row of microbatches a stage."""
    row = st.lists(lengths, min_size=microbatches, max_size=microbatches)
    each = st.lists(st.one_of(lengths, row), min_size=2 * ranks, max_size=2 * ranks)
    cost = st.one_of(lengths, each)
    return Costs(data.draw(cost), data.draw(cost), data.draw(cost), data.draw(st.floats(0, 1)))


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 5), st.integers(1, 12), st.data())
def test_formed_for_costs_it_is_never_slower_nor_larger(
    ranks: int, microbatches: int, data: st.DataObject
) -> None:
    costs = drawn_costs(data, ranks, microbatches)
    usual, formed = v_half(ranks, microbatches), v_half(ranks, microbatches, costs)
    assert simulate(formed, costs).makespan <= simulate(usual, costs).makespan * (1 + 1e-9)
    assert max(verify(formed).peak_live) <= peak(ranks, microbatches)


@pytest.mark.parametrize(
    "costs",
    [
        Costs(forward=1, input_grad=1.2, weight_grad=0.6, communication=0.2),
        Costs(forward=1, input_grad=2, weight_grad=0.3),
        Costs([0.5, 1, 1, 1, 1, 1, 1, 1.6], [0.5, 1, 1, 1, 1, 1, 1, 1.6], 1),
    ],
)
def test_it_gains_where_the_lengths_differ(costs: Costs) -> None:
    usual, formed = v_half(4, 12), v_half(4, 12, costs)
    assert simulate(formed, costs).makespan < 1 * simulate(usual, costs).makespan


@pytest.mark.parametrize("forward", [[1.0] * 4, [1.0] * 9])
def test_costs_of_another_number_of_stages_are_refused(forward: Sequence[float]) -> None:
    with pytest.raises(ConfigError, match="the schedule has 8 stages"):
        v_half(4, 8, Costs(forward=forward))


def test_costs_of_nothing_at_all() -> None:
    verify(v_half(3, 4, Costs(0, 0, 0)))
