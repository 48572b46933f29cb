import pytest

from penstock.errors import ConfigError
from penstock.schedule import Costs, build, simulate
from penstock.schedule.builders.dualpipe import dualpipe, dualpipe_v


def test_half_of_the_microbatches_go_each_way() -> None:
    schedule = dualpipe(4, 6)
    for stage in range(8):
        own = [op.microbatch for program in schedule.programs for op in program if op[:2] == (stage, "F")]
        assert own == ([0, 1, 2] if stage < 4 else [3, 4, 5])


def test_the_two_ways_mirror_each_other() -> None:
    schedule = dualpipe(6, 14)
    for rank in range(6):
        mirrored = [op._replace(stage=(op.stage + 6) % 12, microbatch=(op.microbatch + 7) % 14)
                    for op in schedule.programs[5 - rank]]  # fmt: skip
        assert list(schedule.programs[rank]) == mirrored


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("dualpipe", [(2, 4), (4, 6), (4, 16), (6, 12)]), ("dualpipe_v", [(1, 2), (2, 3), (3, 4), (4, 12)])],
)
def test_a_pair_is_a_forward_and_then_a_backward_of_the_rank_s_other_stage(
    name: str, sizes: list[tuple[int, int]]
) -> None:
    for ranks, microbatches in sizes:
        schedule = build(name, ranks=ranks, microbatches=microbatches)
        assert schedule.overlaps
        for pair in schedule.overlaps:
            assert (pair.forward.kind, pair.backward.kind) == ("F", "B")
            assert pair.forward.stage + pair.backward.stage == 2 * ranks - 1


def test_a_steady_state_is_all_pairs() -> None:
    """All but what phases 1 to 3, 5 and 6 take, and the first two ops of the last rank's phase 4."""
    for ranks, microbatches in [(2, 4), (3, 10), (4, 9)]:
        schedule = dualpipe_v(ranks, microbatches)
        per_rank = [2 * (microbatches - 2 * ranks + r + 1) + ranks - 1 - r for r in range(ranks)]
        assert len(schedule.overlaps) == sum(per_rank) - 1


def test_more_microbatches_cost_only_their_work() -> None:
    costs = Costs(1, 1.5, 0.5)
    few, many = (simulate(dualpipe_v(4, m), costs).makespan for m in (12, 30))
    assert many - few == pytest.approx(6 * 18)


@pytest.mark.parametrize(
    ("sizes", "found", "fit"),
    [((3, 4), "ranks=3", "2 or 4"), ((1, 4), "ranks=1", "2"), ((4, 7), "microbatches=7", "6 or 8"),
     ((2, 1), "microbatches=1", "2")],
)  # fmt: skip
def test_odd_numbers_are_refused_with_those_that_would_do(
    sizes: tuple[int, int], found: str, fit: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        dualpipe(*sizes)
    assert caught.value.value == found
    assert f"Give {found.split('=')[0]}={fit}, or take dualpipe_v" in caught.value.remedy
