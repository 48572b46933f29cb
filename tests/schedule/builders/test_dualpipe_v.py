import pytest
from torch.distributed.pipelining.schedules import ScheduleDualPipeV

from penstock.schedule import Costs, simulate
from penstock.schedule.builders.conformance import check_builder
from penstock.schedule.builders.dualpipe import dualpipe_v
from penstock.schedule.ops import wave
from support.orders import torch_order


def peak(ranks: int, microbatches: int, rank: int) -> int:
    return min(2 * ranks + 1, 2 * microbatches, microbatches + 1 + rank)


def makespan(ranks: int, microbatches: int) -> int:
    if microbatches > ranks:
        return 6 * microbatches + ranks - 1 + max(0, 2 * ranks - microbatches)
    return 4 * microbatches + 4 * ranks - 2


def test_golden() -> None:
    assert str(dualpipe_v(2, 4)).splitlines() == [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 "
        "(0F3;3B1)OVERLAP_F_B (3F2;0B0)OVERLAP_F_B "
        "3B2 (3F3;0B1)OVERLAP_F_B 3B3 0I2 0W2 0I3 0W3",
        "1F0 2F0 1F1 2F1 1F2 2B0 (2F2;1B0)OVERLAP_F_B "
        "(1F3;2B1)OVERLAP_F_B (2F3;1B1)OVERLAP_F_B "
        "2B2 1B2 2I3 1I3 2W3 1W3",
    ]


def test_conforms() -> None:
    check_builder(dualpipe_v, ranks=range(1, 7), microbatches=range(1, 14), placement=wave, peak_live=peak)


@pytest.mark.parametrize("ranks", range(1, 9))
def test_the_bubble(ranks: int) -> None:
    for microbatches in range(1, 2 * ranks + 3):
        assert simulate(dualpipe_v(ranks, microbatches)).makespan == makespan(ranks, microbatches)


@pytest.mark.parametrize("ranks", range(1, 9))
def test_the_same_programs_as_torchs(ranks: int) -> None:
    for microbatches in (2 * ranks, 2 * ranks + 1, 3 * ranks, 5 * ranks):
        ours, torchs = dualpipe_v(ranks, microbatches), torch_order(ScheduleDualPipeV, ranks, microbatches)
        assert ours.programs == torchs.programs
        assert ours.overlaps == torchs.overlaps


def test_the_pairs() -> None:
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
