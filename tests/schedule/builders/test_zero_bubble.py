import pytest
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble

from penstock.errors import ConfigError
from penstock.schedule import Costs, render, simulate, verify
from penstock.schedule.builders.conformance import check_builder
from penstock.schedule.builders.interleaved_1f1b import interleaved_1f1b
from penstock.schedule.builders.one_f_one_b import one_f_one_b
from penstock.schedule.builders.zero_bubble import interleaved_zero_bubble, zb_h1, zb_h2
from penstock.schedule.ops import loop
from support.orders import grid, torch_interleaves, torch_order

SIZES = [(ranks, microbatches) for ranks in range(1, 9) for microbatches in range(1, 20)]


def peak_of_zb_h1(ranks: int, microbatches: int, rank: int) -> int:
    return min(ranks, microbatches)


def makespan(ranks: int, microbatches: int) -> int:
    return 3 * microbatches + ranks - 1 + max(0, ranks - microbatches)


def test_zb_h1_golden() -> None:
    expected = """
        rank 0 | F0 F1 F2 F3 .  .  .  I0 W0 F4 I1 W1 F5 I2 W2 I3 W3 I4 W4 I5 W5
        rank 1 | .  F0 F1 F2 .  .  I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 I4 W3 I5 W4 W5
        rank 2 | .  .  F0 F1 .  I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 I5 W3 W4 W5
        rank 3 | .  .  .  F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 W3 W4 W5
        """
    assert grid(render(zb_h1(4, 6))) == grid(expected)


def test_zb_h1_conforms() -> None:
    check_builder(
        zb_h1, ranks=range(1, 7), microbatches=range(1, 14), placement=loop, peak_live=peak_of_zb_h1
    )


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


def peak_of_zb_h2(ranks: int, microbatches: int, rank: int) -> int:
    return min(2 * ranks - 1, microbatches)


def test_zb_h2_golden() -> None:
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


def test_zb_h2_conforms() -> None:
    check_builder(
        zb_h2, ranks=range(1, 7), microbatches=range(1, 14), placement=loop, peak_live=peak_of_zb_h2
    )


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


INTERLEAVED_SIZES = [(ranks, m, v) for ranks in range(1, 8) for m in range(1, 18) for v in (1, 2, 3)]


def largest_group(ranks: int, microbatches: int) -> int:
    return -(-microbatches // max(1, microbatches // ranks))


def interleaved_peak(ranks: int, microbatches: int, stages_per_rank: int, group: int) -> int:
    return min(ranks + (stages_per_rank - 1) * group, stages_per_rank * microbatches)


def interleaved_makespan(ranks: int, microbatches: int, stages_per_rank: int) -> int:
    """From m = P on."""
    return 3 * stages_per_rank * microbatches + ranks - 1


def test_interleaved_zero_bubble_golden() -> None:
    expected = """
        rank 0 | 0F0 0F1 0F2 2F0 2F1 .   2I0 2W0 2F2 2I1 2W1 2I2 2W2 0I0 0W0 0I1 0W1 0I2 0W2
        rank 1 | .   1F0 1F1 1F2 3F0 3I0 3F1 3I1 3W0 3F2 3I2 3W1 1I0 3W2 1I1 1W0 1I2 1W1 1W2
        """
    assert grid(render(interleaved_zero_bubble(2, 3))) == grid(expected)


@pytest.mark.parametrize("stages_per_rank", [1, 2, 3])
def test_interleaved_zero_bubble_conforms(stages_per_rank: int) -> None:
    check_builder(
        interleaved_zero_bubble,
        ranks=range(1, 7),
        microbatches=range(1, 14),
        placement=lambda ranks: loop(ranks, stages_per_rank),
        peak_live=lambda p, m, rank: interleaved_peak(p, m, stages_per_rank, largest_group(p, m)),
        stages_per_rank=stages_per_rank,
    )


def test_the_bubble() -> None:
    for ranks, microbatches, stages_per_rank in INTERLEAVED_SIZES:
        if microbatches >= ranks:
            timeline = simulate(interleaved_zero_bubble(ranks, microbatches, stages_per_rank))
            assert timeline.makespan == interleaved_makespan(ranks, microbatches, stages_per_rank)
            expected = (ranks - 1) / (3 * stages_per_rank * microbatches + ranks - 1)
            assert timeline.bubble == pytest.approx(expected)


@pytest.mark.parametrize("ranks", range(1, 9))
def test_a_group_size_runs_at_its_bubble_and_memory(ranks: int) -> None:
    """Exactly so where no group has less than P, and else not above that with the last group filled up."""
    for stages_per_rank in (2, 3, 4):
        for microbatches in range(1, 21):
            for group in {ranks, (ranks + microbatches) // 2, max(ranks, microbatches)}:
                if not ranks <= group <= max(ranks, microbatches):
                    continue
                schedule = interleaved_zero_bubble(ranks, microbatches, stages_per_rank, group)
                timeline, left = simulate(schedule), microbatches % group
                full = microbatches + (max(left, ranks) - left if left else 0)
                longest, most = (
                    interleaved_makespan(ranks, full, stages_per_rank),
                    interleaved_peak(ranks, full, stages_per_rank, group),
                )
                if full == microbatches:
                    assert (timeline.makespan, timeline.peak_live) == (longest, (most,) * ranks)
                assert timeline.makespan <= longest
                assert max(timeline.peak_live) <= most


def test_it_is_faster_than_interleaved_1f1b_and_holds_no_more() -> None:
    for ranks, microbatches, stages_per_rank in INTERLEAVED_SIZES:
        ours, whole = (builder(ranks, microbatches, stages_per_rank)
                       for builder in (interleaved_zero_bubble, interleaved_1f1b))  # fmt: skip
        assert simulate(ours).makespan <= simulate(whole).makespan
        assert max(verify(ours).peak_live) <= max(verify(whole).peak_live)


def test_where_torch_has_it_it_is_torchs_order() -> None:
    """So it takes as long and holds as much, at P = 4, m = 16 and v = 2 among others."""
    for ranks, microbatches, stages_per_rank in [*INTERLEAVED_SIZES, (4, 16, 2)]:
        if torch_interleaves(ranks, microbatches):
            torchs = torch_order(ScheduleInterleavedZeroBubble, ranks, microbatches, stages_per_rank)
            assert interleaved_zero_bubble(ranks, microbatches, stages_per_rank).programs == torchs.programs


def test_a_group_size_that_cannot_run() -> None:
    with pytest.raises(ConfigError, match="Give 4 to 16"):
        interleaved_zero_bubble(4, 16, microbatch_group_size=2)


def test_it_needs_buffered_sends() -> None:
    """The halved warm-up lets what comes round wait: about half of P, and what a group holds above P."""
    buffered = {m: verify(interleaved_zero_bubble(4, m)).buffered_sends for m in (1, 3, 4, 8, 11, 16, 32)}
    assert buffered == {1: 0, 3: 0, 4: 1, 8: 2, 11: 3, 16: 2, 32: 2}
