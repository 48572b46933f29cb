import pytest

from penstock.errors import ConfigError
from penstock.schedule import Placement, loop


def test_loop_goes_round_the_ranks() -> None:
    placement = loop(3, stages_per_rank=2)
    assert placement.rank_of == (0, 1, 2, 0, 1, 2)
    assert (placement.ranks, placement.stages) == (3, 6)
    assert [placement.stages_of(rank) for rank in range(3)] == [(0, 3), (1, 4), (2, 5)]


def test_a_given_placement_keeps_the_order_of_the_data() -> None:
    there_and_back = Placement((0, 1, 1, 0))
    assert there_and_back.stages_of(0) == (0, 3)
    assert there_and_back.stages_of(1) == (1, 2)


@pytest.mark.parametrize("rank_of", [(), (1,), (0, 2), (0, -1)])
def test_a_rank_without_a_stage_is_refused(rank_of: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="each rank from 0 to the highest") as caught:
        Placement(rank_of)
    assert caught.value.value == f"placement {list(rank_of)}"
