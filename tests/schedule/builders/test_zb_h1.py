import pytest

from penstock.schedule import Costs, render, simulate, verify
from penstock.schedule.builders.conformance import check_builder
from penstock.schedule.builders.one_f_one_b import one_f_one_b
from penstock.schedule.builders.zero_bubble import interleaved_zero_bubble, zb_h1
from penstock.schedule.ops import loop
from support.orders import grid

SIZES = [(ranks, microbatches) for ranks in range(1, 9) for microbatches in range(1, 18)]


def peak(ranks: int, microbatches: int, rank: int) -> int:
    return min(ranks, microbatches)


def makespan(ranks: int, microbatches: int) -> int:
    return 3 * microbatches + ranks - 1 + max(0, ranks - microbatches)


def test_golden() -> None:
    expected = """
        rank 0 | F0 F1 F2 F3 .  .  .  I0 W0 F4 I1 W1 F5 I2 W2 I3 W3 I4 W4 I5 W5
        rank 1 | .  F0 F1 F2 .  .  I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 I4 W3 I5 W4 W5
        rank 2 | .  .  F0 F1 .  I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 I5 W3 W4 W5
        rank 3 | .  .  .  F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 W3 W4 W5
        """
    assert grid(render(zb_h1(4, 6))) == grid(expected)


def test_conforms() -> None:
    check_builder(zb_h1, ranks=range(1, 7), microbatches=range(1, 14), placement=loop, peak_live=peak)


def test_the_bubble_in_unit_times() -> None:
    for ranks, microbatches in SIZES:
        timeline = simulate(zb_h1(ranks, microbatches))
        assert timeline.makespan == makespan(ranks, microbatches)
        if microbatches >= ranks:
            assert timeline.bubble == pytest.approx((ranks - 1) / (3 * microbatches + ranks - 1))


@pytest.mark.parametrize(("f", "i", "w"), [(1, 1, 1), (1, 1.25, 0.75), (2, 2.5, 1), (1, 2, 0.2), (3, 2, 2)])
def test_rank_0_idles_as_the_paper_says(f: float, i: float, w: float) -> None:
    for ranks in range(2, 8):
        for microbatches in (ranks, ranks + 1, 3 * ranks):
            timeline = simulate(zb_h1(ranks, microbatches), Costs(f, i, w))
            idle = (ranks - 1) * (f + i - w)
            assert timeline.makespan == pytest.approx(microbatches * (f + i + w) + idle)


def test_it_is_interleaved_zero_bubble_with_one_stage_a_rank() -> None:
    for ranks, microbatches in SIZES:
        other = interleaved_zero_bubble(ranks, microbatches, stages_per_rank=1)
        assert zb_h1(ranks, microbatches).programs == other.programs


def test_it_is_faster_than_1f1b_for_the_same_peak_over_all_ranks() -> None:
    for ranks, microbatches in SIZES:
        ours, whole, split = (
            zb_h1(ranks, microbatches),
            one_f_one_b(ranks, microbatches),
            one_f_one_b(ranks, microbatches, zero_bubble=True),
        )
        assert max(verify(ours).peak_live) == max(verify(whole).peak_live)
        assert simulate(ours).makespan <= simulate(split).makespan <= simulate(whole).makespan


def test_no_send_needs_a_buffer() -> None:
    for ranks, microbatches in SIZES:
        assert verify(zb_h1(ranks, microbatches)).buffered_sends == 0
