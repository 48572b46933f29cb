import pytest

from penstock.schedule import Costs, Op, Schedule, render, simulate, verify
from penstock.schedule.builders.conformance import check_builder
from penstock.schedule.builders.gpipe import gpipe, looped_bfs
from penstock.schedule.ops import loop
from support.orders import grid

SIZES = [(ranks, m, v) for ranks in range(1, 7) for m in range(1, 14) for v in (1, 2, 3)]


def makespan(ranks: int, microbatches: int, stages_per_rank: int) -> int:
    if microbatches >= ranks:
        return 3 * (stages_per_rank * microbatches + ranks - 1)
    return 3 * (stages_per_rank * ranks + microbatches - 1)


def test_golden() -> None:
    expected = """
        rank 0 | 0F0 0F1 0F2 2F0 2F1 2F2 .   .   .   2B0 2B0 2B1 2B1 2B2 2B2 0B0 0B0 0B1 0B1 0B2 0B2
        rank 1 | .   1F0 1F1 1F2 3F0 3F1 3F2 3B0 3B0 3B1 3B1 3B2 3B2 1B0 1B0 1B1 1B1 1B2 1B2 .   .
        """
    assert grid(render(looped_bfs(2, 3))) == grid(expected)


@pytest.mark.parametrize("stages_per_rank", [1, 2, 3])
def test_conforms(stages_per_rank: int) -> None:
    check_builder(
        looped_bfs,
        ranks=range(1, 7),
        microbatches=range(1, 14),
        placement=lambda ranks: loop(ranks, stages_per_rank),
        peak_live=lambda ranks, microbatches, rank: stages_per_rank * microbatches,
        stages_per_rank=stages_per_rank,
    )


def test_the_bubble() -> None:
    for ranks, microbatches, stages_per_rank in SIZES:
        timeline = simulate(looped_bfs(ranks, microbatches, stages_per_rank))
        assert timeline.makespan == makespan(ranks, microbatches, stages_per_rank)
        if microbatches >= ranks:
            expected = (ranks - 1) / (stages_per_rank * microbatches + ranks - 1)
            assert timeline.bubble == pytest.approx(expected)


def test_with_one_stage_a_rank_it_is_gpipe() -> None:
    assert looped_bfs(4, 6, stages_per_rank=1).programs == gpipe(4, 6).programs


def reversed_backwards(schedule: Schedule) -> Schedule:
    """Torch's order."""
    last = schedule.microbatches - 1
    programs = tuple(
        tuple(op if op.kind == "F" else Op(op.stage, "B", last - op.microbatch) for op in program)
        for program in schedule.programs
    )
    return Schedule("reversed", schedule.placement, schedule.microbatches, programs)


@pytest.mark.parametrize("costs", [Costs(), Costs(1.0, 1.2, 0.7, communication=0.3)])
def test_reversed_backwards_take_as_long(costs: Costs) -> None:
    for ranks, microbatches, stages_per_rank in SIZES:
        schedule = looped_bfs(ranks, microbatches, stages_per_rank)
        ours, torchs = (simulate(s, costs).makespan for s in (schedule, reversed_backwards(schedule)))
        assert ours == pytest.approx(torchs)


def test_sends_need_a_buffer_from_two_rounds_on() -> None:
    """The results of a lap wait until the rank that takes them is through with the lap before."""
    for ranks in range(2, 6):
        for microbatches in range(1, 4 * ranks):
            proof = verify(looped_bfs(ranks, microbatches))
            assert proof.buffered_sends == max(0, microbatches // ranks - 1)
