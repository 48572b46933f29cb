import pytest

from penstock.schedule import Costs, render, simulate, verify
from penstock.schedule.builders.conformance import check_builder
from penstock.schedule.builders.zero_bubble import zb_h1, zb_h2
from penstock.schedule.ops import loop
from support.orders import grid

SIZES = [(ranks, microbatches) for ranks in range(1, 9) for microbatches in range(1, 20)]


def peak(ranks: int, microbatches: int, rank: int) -> int:
    return min(2 * ranks - 1, microbatches)


def makespan(ranks: int, microbatches: int) -> int:
    return 3 * microbatches + ranks - 1 + max(0, ranks - microbatches)


def test_golden() -> None:
    expected = """
        rank 0 | F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3 .
        rank 1 | .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
        """
    assert grid(render(zb_h2(2, 4))) == grid(expected)


def test_golden_with_few_microbatches() -> None:
    """Rank 1 puts off one weight gradient instead of two: all three would hold up the gradients."""
    expected = """
        rank 0 | F0 F1 F2 .  .  I0 W0 I1 W1 I2 W2
        rank 1 | .  F0 F1 F2 I0 .  I1 W0 I2 W1 W2
        rank 2 | .  .  F0 I0 F1 I1 F2 I2 W0 W1 W2
        """
    assert grid(render(zb_h2(3, 3))) == grid(expected)


def test_conforms() -> None:
    check_builder(zb_h2, ranks=range(1, 7), microbatches=range(1, 14), placement=loop, peak_live=peak)


def test_no_rank_ever_pauses() -> None:
    for ranks in range(1, 9):
        for microbatches in (2 * ranks - 1, 2 * ranks, 5 * ranks):
            assert simulate(zb_h2(ranks, microbatches)).rank_inner_bubble == (0.0,) * ranks


def test_one_microbatch_less_and_a_rank_pauses() -> None:
    for ranks in range(2, 9):
        assert simulate(zb_h2(ranks, 2 * ranks - 2)).inner_bubble > 0


def test_the_makespan_in_unit_times() -> None:
    for ranks, microbatches in SIZES:
        timeline = simulate(zb_h2(ranks, microbatches))
        assert timeline.makespan == makespan(ranks, microbatches)
        if microbatches >= ranks:
            assert timeline.bubble == pytest.approx((ranks - 1) / (3 * microbatches + ranks - 1))


@pytest.mark.parametrize(("f", "i", "w"), [(1, 1, 1), (1, 1.25, 0.75), (2, 2.5, 1), (1, 2, 0.2), (3, 3, 2)])
def test_ranks_idle_as_the_paper_says(f: float, i: float, w: float) -> None:
    for ranks in range(2, 8):
        for microbatches in (2 * ranks - 1, 2 * ranks, 3 * ranks):
            timeline = simulate(zb_h2(ranks, microbatches), Costs(f, i, w))
            idle = [
                spans[-1].end - spans[0].start - microbatches * (f + i + w)
                for spans in map(timeline.of_rank, range(ranks))
            ]
            assert max(idle) == pytest.approx((ranks - 1) * (f + i - 2 * w))


def test_it_is_never_worse_than_zb_h1() -> None:
    for ranks, microbatches in SIZES:
        ours, other = simulate(zb_h2(ranks, microbatches)), simulate(zb_h1(ranks, microbatches))
        assert ours.makespan <= other.makespan
        assert ours.inner_bubble <= other.inner_bubble + 1e-12


def test_how_many_sends_need_a_buffer() -> None:
    """One from m = 2P on: rank 0 is a forward ahead of what the next rank asks for."""
    for ranks, microbatches in SIZES:
        expected = 1 if ranks > 1 and microbatches >= 2 * ranks else 0
        assert verify(zb_h2(ranks, microbatches)).buffered_sends == expected
