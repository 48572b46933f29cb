import pytest

from penstock.schedule import Costs, Op, Placement, Schedule, simulate, verify
from penstock.schedule.builders.gpipe import forwards, looped_bfs


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
    for ranks, microbatches, stages_per_rank in [(1, 3, 2), (2, 5, 1), (3, 2, 3), (4, 4, 2), (5, 12, 3)]:
        schedule = looped_bfs(ranks, microbatches, stages_per_rank)
        ours, torchs = (simulate(s, costs).makespan for s in (schedule, reversed_backwards(schedule)))
        assert ours == pytest.approx(torchs)


def test_forwards_run_on_any_placement() -> None:
    for rank_of in [(0, 1, 1, 0), (1, 0), (0, 0, 1, 2, 2, 0), (2, 0, 1, 0, 2)]:
        for microbatches in range(1, 8):
            verify(forwards(Placement(rank_of), microbatches))
