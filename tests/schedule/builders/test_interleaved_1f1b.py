import pytest
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

from penstock.errors import ConfigError
from penstock.schedule import render, simulate, verify
from penstock.schedule.builders.conformance import check_builder
from penstock.schedule.builders.interleaved_1f1b import interleaved_1f1b, microbatch_groups
from penstock.schedule.builders.one_f_one_b import one_f_one_b
from penstock.schedule.ops import loop
from support.orders import grid, torch_interleaves, torch_order

SIZES = [(ranks, m, v) for ranks in range(1, 8) for m in range(1, 18) for v in (2, 3)]
GROUPED = [
    (ranks, m, v, group)
    for ranks in range(1, 9)
    for m in range(1, 21)
    for v in range(1, 5)
    for group in {ranks, (ranks + m) // 2, m - 1, m}
    if ranks <= group <= max(ranks, m)
]


def largest_group(ranks: int, microbatches: int) -> int:
    return -(-microbatches // max(1, microbatches // ranks))


def peak(ranks: int, microbatches: int, rank: int, stages_per_rank: int, group: int) -> int:
    if stages_per_rank == 1:
        return min(ranks - rank, microbatches)
    return min(2 * (ranks - rank) - 1 + (stages_per_rank - 1) * group, stages_per_rank * microbatches)


def makespan(ranks: int, microbatches: int, stages_per_rank: int) -> int:
    if microbatches >= ranks:
        return 3 * (stages_per_rank * microbatches + ranks - 1)
    return 3 * (stages_per_rank * ranks + microbatches - 1)


def filled_up(ranks: int, microbatches: int, group: int) -> int:
    """How many microbatches there would be if the last group had P or more."""
    left = microbatches % group
    return microbatches + (max(left, ranks) - left if left else 0)


def test_golden() -> None:
    expected = """
        rank 0 | 0F0 0F1 0F2 2F0 2F1 2F2 .   2B0 2B0 .   2B1 2B1 .   2B2 2B2 0B0 0B0 0B1 0B1 0B2 0B2
        rank 1 | .   1F0 1F1 1F2 3F0 3B0 3B0 3F1 3B1 3B1 3F2 3B2 3B2 1B0 1B0 1B1 1B1 1B2 1B2 .   .
        """
    assert grid(render(interleaved_1f1b(2, 3))) == grid(expected)


def test_golden_with_a_smaller_last_group() -> None:
    """One microbatch alone in the last group: its second lap waits for its first."""
    expected = """
        rank 0 | 0F0 0F1 2F0 2F1 0F2 .   2B0 2B0 .   2B1 2B1 2F2 0B0 0B0 0B1 0B1 .   2B2 2B2 .   .   0B2 0B2
        rank 1 | .   1F0 1F1 3F0 3B0 3B0 3F1 3B1 3B1 1F2 1B0 1B0 1B1 1B1 3F2 3B2 3B2 .   .   1B2 1B2 .   .
        """
    assert grid(render(interleaved_1f1b(2, 3, microbatch_group_size=2))) == grid(expected)


@pytest.mark.parametrize("stages_per_rank", [1, 2, 3])
def test_conforms(stages_per_rank: int) -> None:
    check_builder(
        interleaved_1f1b,
        ranks=range(1, 7),
        microbatches=range(1, 14),
        placement=lambda ranks: loop(ranks, stages_per_rank),
        peak_live=lambda p, m, rank: peak(p, m, rank, stages_per_rank, largest_group(p, m)),
        stages_per_rank=stages_per_rank,
    )


def test_the_bubble() -> None:
    for ranks, microbatches, stages_per_rank in SIZES:
        timeline = simulate(interleaved_1f1b(ranks, microbatches, stages_per_rank))
        assert timeline.makespan == makespan(ranks, microbatches, stages_per_rank)
        if microbatches >= ranks:
            expected = (ranks - 1) / (stages_per_rank * microbatches + ranks - 1)
            assert timeline.bubble == pytest.approx(expected)


@pytest.mark.parametrize("ranks", range(1, 9))
def test_a_group_size_runs_at_its_bubble_and_memory(ranks: int) -> None:
    """Exactly so where no group has less than P, and else not above that with the last group filled up."""
    for _, microbatches, stages_per_rank, group in (size for size in GROUPED if size[0] == ranks):
        timeline = simulate(interleaved_1f1b(ranks, microbatches, stages_per_rank, group))
        full = filled_up(ranks, microbatches, group)
        longest = 3 * (stages_per_rank * full + ranks - 1)
        most = tuple(peak(ranks, full, rank, stages_per_rank, min(group, full)) for rank in range(ranks))
        if full == microbatches:
            assert (timeline.makespan, timeline.peak_live) == (longest, most)
        assert timeline.makespan <= longest
        assert all(live <= limit for live, limit in zip(timeline.peak_live, most, strict=True))


def test_groups_of_p_hold_the_fewest_activations() -> None:
    for ranks, microbatches, stages_per_rank, group in GROUPED:
        if stages_per_rank == 2 and ranks <= microbatches and ranks <= 5:
            lean, other = (
                verify(interleaved_1f1b(ranks, microbatches, stages_per_rank, size)).peak_live
                for size in (ranks, group)
            )
            assert max(lean) <= max(other)


def test_with_one_stage_a_rank_it_is_1f1b() -> None:
    for ranks, microbatches, _ in SIZES:
        interleaved = interleaved_1f1b(ranks, microbatches, stages_per_rank=1)
        assert interleaved.programs == one_f_one_b(ranks, microbatches).programs


def test_its_bubble_is_smaller_than_1f1bs_from_m_equal_p_on() -> None:
    for ranks in range(2, 8):
        for microbatches in range(ranks, 4 * ranks):
            ours, other = interleaved_1f1b(ranks, microbatches), one_f_one_b(ranks, microbatches)
            assert simulate(ours).bubble < simulate(other).bubble


def test_where_torch_has_it_it_is_torchs_order() -> None:
    for ranks, microbatches, stages_per_rank in SIZES:
        if torch_interleaves(ranks, microbatches):
            torchs = torch_order(ScheduleInterleaved1F1B, ranks, microbatches, stages_per_rank)
            assert interleaved_1f1b(ranks, microbatches, stages_per_rank).programs == torchs.programs


@pytest.mark.parametrize(
    ("ranks", "microbatches", "size", "remedy"),
    [(4, 16, 3, "4 to 16"), (4, 16, 17, "4 to 16"), (4, 3, 3, "Give 4, or"), (4, 4, 5, "Give 4, or")],
)
def test_a_group_size_that_cannot_run(ranks: int, microbatches: int, size: int, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy) as caught:
        interleaved_1f1b(ranks, microbatches, microbatch_group_size=size)
    assert caught.value.value == f"microbatch_group_size={size}"


@pytest.mark.parametrize(
    ("microbatches", "size", "lengths"),
    [(3, None, [3]), (4, None, [4]), (7, None, [7]), (9, None, [5, 4]), (14, None, [5, 5, 4]),
     (3, 4, [4]), (12, 4, [4, 4, 4]), (14, 4, [4, 4, 4, 4]), (14, 9, [9, 5])],
)  # fmt: skip
def test_groups(microbatches: int, size: int | None, lengths: list[int]) -> None:
    """For four ranks; a last group of less than four counts four."""
    groups = microbatch_groups(4, microbatches, size)
    assert sorted(map(len, groups), reverse=True) == lengths
    assert [i for group in groups for i in group] == list(range(sum(lengths)))


def test_how_many_sends_need_a_buffer() -> None:
    """What comes round early waits: as many as a group holds above P, and one from two groups on."""
    for ranks in range(2, 7):
        for microbatches in range(ranks, 4 * ranks):
            extra = largest_group(ranks, microbatches) - ranks
            expected = max(extra, 1) if microbatches >= 2 * ranks else 0
            assert verify(interleaved_1f1b(ranks, microbatches)).buffered_sends == expected
