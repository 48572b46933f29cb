import pytest
from torch.distributed.pipelining.schedules import ScheduleDualPipeV

from penstock.errors import ConfigError
from penstock.schedule import Costs, simulate, verify
from penstock.schedule.builders.conformance import check_builder
from penstock.schedule.builders.dualpipe import dualpipe, dualpipe_v
from penstock.schedule.ops import both_ways, wave
from support.orders import torch_order

RANKS, MICROBATCHES = (2, 4, 6, 8), range(2, 21, 2)


def peak_of_dualpipe(ranks: int, microbatches: int, rank: int) -> int:
    from_end = min(rank, ranks - 1 - rank)
    return min(ranks + 1, microbatches, microbatches // 2 + 1 + from_end)


def makespan_of_dualpipe(ranks: int, microbatches: int) -> int:
    if microbatches > ranks:
        return 3 * microbatches + ranks // 2 - 1 + max(0, ranks - microbatches // 2)
    return 2 * microbatches + 2 * ranks - 2


def test_dualpipe_golden() -> None:
    assert str(dualpipe(2, 8)).splitlines() == [
        "0F0 3F4 0F1 3B4 (3F5;0B0)OVERLAP_F_B "
        "(0F2;3B5)OVERLAP_F_B (3F6;0B1)OVERLAP_F_B "
        "(0F3;3B6)OVERLAP_F_B (3F7;0B2)OVERLAP_F_B "
        "3B7 0I3 0W3",
        "2F4 1F0 2F5 1B0 (1F1;2B4)OVERLAP_F_B "
        "(2F6;1B1)OVERLAP_F_B (1F2;2B5)OVERLAP_F_B "
        "(2F7;1B2)OVERLAP_F_B (1F3;2B6)OVERLAP_F_B "
        "1B3 2I7 2W7",
    ]


def test_dualpipe_conforms() -> None:
    check_builder(
        dualpipe, ranks=RANKS, microbatches=MICROBATCHES, placement=both_ways, peak_live=peak_of_dualpipe
    )


@pytest.mark.parametrize("ranks", RANKS)
def test_dualpipe_the_bubble(ranks: int) -> None:
    for microbatches in MICROBATCHES:
        assert simulate(dualpipe(ranks, microbatches)).makespan == makespan_of_dualpipe(ranks, microbatches)


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


def test_dualpipe_the_pairs() -> None:
    """Each stands in one program: a forward of one copy, and right after it a backward of the other."""
    for ranks, microbatches in [(2, 4), (4, 6), (4, 16), (6, 12)]:
        schedule = dualpipe(ranks, microbatches)
        assert schedule.overlaps
        for pair in schedule.overlaps:
            assert (pair.forward.kind, pair.backward.kind) == ("F", "B")
            assert pair.forward.stage + pair.backward.stage == 2 * ranks - 1
            program = schedule.programs[schedule.placement.rank_of[pair.forward.stage]]
            assert program[program.index(pair.forward) + 1] == pair.backward


def test_it_holds_what_the_paper_says() -> None:
    for ranks in RANKS:
        assert verify(dualpipe(ranks, 2 * ranks)).peak_live == (ranks + 1,) * ranks


@pytest.mark.parametrize(
    ("sizes", "given", "fit"),
    [((3, 4), "ranks=3", "2 or 4"), ((1, 4), "ranks=1", "2"), ((4, 7), "microbatches=7", "6 or 8"),
     ((2, 1), "microbatches=1", "2")],
)  # fmt: skip
def test_odd_numbers_are_refused_with_those_that_would_do(
    sizes: tuple[int, int], given: str, fit: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        dualpipe(*sizes)
    assert caught.value.value == given
    assert f"Give {given.split('=')[0]}={fit}, or take dualpipe_v" in caught.value.remedy


def peak_of_dualpipe_v(ranks: int, microbatches: int, rank: int) -> int:
    return min(2 * ranks + 1, 2 * microbatches, microbatches + 1 + rank)


def makespan_of_dualpipe_v(ranks: int, microbatches: int) -> int:
    if microbatches > ranks:
        return 6 * microbatches + ranks - 1 + max(0, 2 * ranks - microbatches)
    return 4 * microbatches + 4 * ranks - 2


def test_dualpipe_v_golden() -> None:
    assert str(dualpipe_v(2, 4)).splitlines() == [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 "
        "(0F3;3B1)OVERLAP_F_B (3F2;0B0)OVERLAP_F_B "
        "3B2 (3F3;0B1)OVERLAP_F_B 3B3 0I2 0W2 0I3 0W3",
        "1F0 2F0 1F1 2F1 1F2 2B0 (2F2;1B0)OVERLAP_F_B "
        "(1F3;2B1)OVERLAP_F_B (2F3;1B1)OVERLAP_F_B "
        "2B2 1B2 2I3 1I3 2W3 1W3",
    ]


def test_dualpipe_v_conforms() -> None:
    check_builder(
        dualpipe_v, ranks=range(1, 7), microbatches=range(1, 14), placement=wave, peak_live=peak_of_dualpipe_v
    )


@pytest.mark.parametrize("ranks", range(1, 9))
def test_dualpipe_v_the_bubble(ranks: int) -> None:
    for microbatches in range(1, 2 * ranks + 3):
        assert simulate(dualpipe_v(ranks, microbatches)).makespan == makespan_of_dualpipe_v(
            ranks, microbatches
        )


@pytest.mark.parametrize("ranks", range(1, 9))
def test_the_same_programs_as_torchs(ranks: int) -> None:
    for microbatches in (2 * ranks, 2 * ranks + 1, 3 * ranks, 5 * ranks):
        ours, torchs = dualpipe_v(ranks, microbatches), torch_order(ScheduleDualPipeV, ranks, microbatches)
        assert ours.programs == torchs.programs
        assert ours.overlaps == torchs.overlaps


def test_dualpipe_v_the_pairs() -> None:
    """Each stands in one program: a forward, and right after it a backward of the rank's other stage."""
    for ranks, microbatches in [(1, 2), (2, 3), (3, 4), (4, 5), (4, 12)]:
        schedule = dualpipe_v(ranks, microbatches)
        assert schedule.overlaps
        for pair in schedule.overlaps:
            assert (pair.forward.kind, pair.backward.kind) == ("F", "B")
            assert pair.forward.stage + pair.backward.stage == 2 * ranks - 1
            program = schedule.programs[schedule.placement.rank_of[pair.forward.stage]]
            assert program[program.index(pair.forward) + 1] == pair.backward


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
