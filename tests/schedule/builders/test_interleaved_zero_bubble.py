import pytest
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble

from penstock.errors import ConfigError
from penstock.schedule import render, simulate, verify
from penstock.schedule.builders.conformance import check_builder
from penstock.schedule.builders.interleaved_1f1b import interleaved_1f1b
from penstock.schedule.builders.zero_bubble import interleaved_zero_bubble
from penstock.schedule.ops import loop
from support.orders import grid, torch_interleaves, torch_order

SIZES = [(ranks, m, v) for ranks in range(1, 8) for m in range(1, 18) for v in (1, 2, 3)]


def largest_group(ranks: int, microbatches: int) -> int:
    return -(-microbatches // max(1, microbatches // ranks))


def peak(ranks: int, microbatches: int, stages_per_rank: int, group: int) -> int:
    return min(ranks + (stages_per_rank - 1) * group, stages_per_rank * microbatches)


def makespan(ranks: int, microbatches: int, stages_per_rank: int) -> int:
    """From m = P on."""
    return 3 * stages_per_rank * microbatches + ranks - 1


def test_golden() -> None:
    expected = """
        rank 0 | 0F0 0F1 0F2 2F0 2F1 .   2I0 2W0 2F2 2I1 2W1 2I2 2W2 0I0 0W0 0I1 0W1 0I2 0W2
        rank 1 | .   1F0 1F1 1F2 3F0 3I0 3F1 3I1 3W0 3F2 3I2 3W1 1I0 3W2 1I1 1W0 1I2 1W1 1W2
        """
    assert grid(render(interleaved_zero_bubble(2, 3))) == grid(expected)


@pytest.mark.parametrize("stages_per_rank", [1, 2, 3])
def test_conforms(stages_per_rank: int) -> None:
    check_builder(
        interleaved_zero_bubble,
        ranks=range(1, 7),
        microbatches=range(1, 14),
        placement=lambda ranks: loop(ranks, stages_per_rank),
        peak_live=lambda p, m, rank: peak(p, m, stages_per_rank, largest_group(p, m)),
        stages_per_rank=stages_per_rank,
    )


def test_the_bubble() -> None:
    for ranks, microbatches, stages_per_rank in SIZES:
        if microbatches >= ranks:
            timeline = simulate(interleaved_zero_bubble(ranks, microbatches, stages_per_rank))
            assert timeline.makespan == makespan(ranks, microbatches, stages_per_rank)
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
                    makespan(ranks, full, stages_per_rank),
                    peak(ranks, full, stages_per_rank, group),
                )
                if full == microbatches:
                    assert (timeline.makespan, timeline.peak_live) == (longest, (most,) * ranks)
                assert timeline.makespan <= longest
                assert max(timeline.peak_live) <= most


def test_it_is_faster_than_interleaved_1f1b_and_holds_no_more() -> None:
    for ranks, microbatches, stages_per_rank in SIZES:
        ours, whole = (builder(ranks, microbatches, stages_per_rank)
                       for builder in (interleaved_zero_bubble, interleaved_1f1b))  # fmt: skip
        assert simulate(ours).makespan <= simulate(whole).makespan
        assert max(verify(ours).peak_live) <= max(verify(whole).peak_live)


def test_where_torch_has_it_it_is_torchs_order() -> None:
    """So it takes as long and holds as much, at P = 4, m = 16 and v = 2 among others."""
    for ranks, microbatches, stages_per_rank in [*SIZES, (4, 16, 2)]:
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
