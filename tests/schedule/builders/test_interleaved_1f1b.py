"""Microbatches in groups: interleaved 1F1B, and interleaved zero bubble."""

from __future__ import annotations

import pytest

from penstock.errors import ConfigError
from penstock.schedule import build, simulate, verify
from penstock.schedule.builders.interleaved_1f1b import interleaved_1f1b, microbatch_groups
from support.refusals import refuses

GROUPED = [
    (ranks, m, v, group)
    for ranks in range(1, 7)
    for m in (ranks - 1, ranks, ranks + 2, 2 * ranks + 1, 3 * ranks, 4 * ranks - 1)
    for v in (1, 2, 3)
    for group in sorted({ranks, (ranks + m) // 2, m - 1, m})
    if m > 0 and ranks <= group <= max(ranks, m)
]


def peak(name: str, ranks: int, microbatches: int, rank: int, v: int, group: int) -> int:
    ahead = ranks if name == "interleaved_zero_bubble" else 2 * (ranks - rank) - 1 if v > 1 else ranks - rank
    return min(ahead + (v - 1) * group, v * microbatches)


@pytest.mark.parametrize("name", ["interleaved_1f1b", "interleaved_zero_bubble"])
def test_a_group_size_runs_at_its_bubble_and_memory(name: str) -> None:
    """Exactly so where no group has less than P, and else not above that with the last group filled up."""
    for ranks, microbatches, v, group in GROUPED:
        options = {"stages_per_rank": v, "microbatch_group_size": group}
        timeline = simulate(build(name, ranks=ranks, microbatches=microbatches, **options))
        left = microbatches % group
        full = microbatches + (max(left, ranks) - left if left else 0)
        longest = 3 * v * full + (ranks - 1) * (1 if name == "interleaved_zero_bubble" else 3)
        most = tuple(peak(name, ranks, full, rank, v, min(group, full)) for rank in range(ranks))
        if full == microbatches:
            assert (timeline.makespan, timeline.peak_live) == (longest, most)
        assert timeline.makespan <= longest
        assert all(live <= limit for live, limit in zip(timeline.peak_live, most, strict=True))


def test_groups_of_p_hold_the_fewest_activations() -> None:
    for ranks, microbatches, v, group in GROUPED:
        if v == 2 and ranks <= microbatches:
            sizes = (ranks, group)
            lean, other = (verify(interleaved_1f1b(ranks, microbatches, v, s)).peak_live for s in sizes)
            assert max(lean) <= max(other)


def test_with_fewer_microbatches_than_ranks_zero_bubble_is_no_slower_either() -> None:
    for ranks in range(2, 8):
        for microbatches in range(1, ranks):
            ours, whole = (
                simulate(build(name, ranks=ranks, microbatches=microbatches, stages_per_rank=2))
                for name in ("interleaved_zero_bubble", "interleaved_1f1b")
            )
            assert ours.makespan <= whole.makespan


@pytest.mark.parametrize("name", ["interleaved_1f1b", "interleaved_zero_bubble"])
@pytest.mark.parametrize(
    ("microbatches", "size", "remedy"),
    [(16, 3, "Give 4 to 16,"), (16, 17, "Give 4 to 16,"), (3, 3, "Give 4, or"), (4, 5, "Give 4, or")],
)
def test_a_group_size_that_cannot_run(name: str, microbatches: int, size: int, remedy: str) -> None:
    with refuses(ConfigError, f"microbatch_group_size={size}", "deadlock", remedy):
        build(name, ranks=4, microbatches=microbatches, microbatch_group_size=size)


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
