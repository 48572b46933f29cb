from collections.abc import Mapping

import pytest

from penstock.errors import ConfigError
from penstock.schedule import Costs, Placement, build, render, simulate, verify
from penstock.schedule.builders.gpipe import forwards

SIZES = [(ranks, microbatches) for ranks in range(1, 7) for microbatches in range(1, 10)]

GOLDEN: list[tuple[str, Mapping[str, int], str]] = [
    (
        "gpipe",
        {"ranks": 2, "microbatches": 3},
        """
        rank 0 | F0 F1 F2 .  .  .  B0 B0 B1 B1 B2 B2
        rank 1 | .  F0 F1 F2 B0 B0 B1 B1 B2 B2 .  .
        """,
    ),
    (
        "gpipe",
        {"ranks": 3, "microbatches": 1},
        """
        rank 0 | F0 .  .  .  .  .  .  B0 B0
        rank 1 | .  F0 .  .  .  B0 B0 .  .
        rank 2 | .  .  F0 B0 B0 .  .  .  .
        """,
    ),
    (
        "1f1b",
        {"ranks": 2, "microbatches": 4},
        """
        rank 0 | F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 .  B3 B3
        rank 1 | .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 .  .
        """,
    ),
    (
        "1f1b",
        {"ranks": 4, "microbatches": 2},
        """
        rank 0 | F0 F1 .  .  .  .  .  .  .  .  B0 B0 .  B1 B1
        rank 1 | .  F0 F1 .  .  .  .  .  B0 B0 .  B1 B1 .  .
        rank 2 | .  .  F0 F1 .  .  B0 B0 .  B1 B1 .  .  .  .
        rank 3 | .  .  .  F0 B0 B0 F1 B1 B1 .  .  .  .  .  .
        """,
    ),
    (
        "1f1b",
        {"ranks": 1, "microbatches": 2},
        """
        rank 0 | F0 B0 B0 F1 B1 B1
        """,
    ),
    (
        "inference",
        {"ranks": 2, "microbatches": 3, "stages_per_rank": 2},
        """
        rank 0 | 0F0 0F1 2F0 2F1 0F2 .   2F2 .
        rank 1 | .   1F0 1F1 3F0 3F1 1F2 .   3F2
        """,
    ),
]


def grid(text: str) -> list[str]:
    """The rows of the ranks in a drawing."""
    return [line.strip() for line in text.splitlines() if line.strip().startswith("rank ") and "|" in line]


@pytest.mark.parametrize(("name", "sizes", "drawing"), GOLDEN)
def test_golden(name: str, sizes: Mapping[str, int], drawing: str) -> None:
    assert grid(render(build(name, **sizes))) == grid(drawing)


@pytest.mark.parametrize("costs", [Costs(), Costs(1.0, 0.5, 0.25), Costs(2.0, 1.0, 3.0)])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_bubble_of_training(name: str, costs: Costs) -> None:
    for ranks, microbatches in SIZES:
        timeline = simulate(build(name, ranks=ranks, microbatches=microbatches), costs)
        assert timeline.bubble == pytest.approx((ranks - 1) / (microbatches + ranks - 1))


def test_the_bubble_of_inference() -> None:
    for ranks, microbatches in SIZES:
        timeline = simulate(build("inference", ranks=ranks, microbatches=microbatches))
        assert timeline.bubble == pytest.approx((ranks - 1) / (microbatches + ranks - 1))


@pytest.mark.parametrize("stages_per_rank", [2, 3])
def test_the_bubble_of_inference_with_several_stages_a_rank(stages_per_rank: int) -> None:
    for ranks in range(1, 5):
        for groups in (1, 2, 3):
            microbatches = groups * ranks
            schedule = build(
                "inference", ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank
            )
            expected = (ranks - 1) / (stages_per_rank * microbatches + ranks - 1)
            assert simulate(schedule).bubble == pytest.approx(expected)


def test_forwards_run_on_any_placement() -> None:
    for rank_of in [(0, 1, 1, 0), (1, 0), (0, 0, 1, 2, 2, 0), (2, 0, 1, 0, 2)]:
        for microbatches in range(1, 8):
            verify(forwards(Placement(rank_of), microbatches))


def test_an_unknown_name_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'gpipe'") as caught:
        build("GPipes", ranks=2, microbatches=2)
    assert caught.value.value == "schedule 'GPipes'"
    with pytest.raises(ConfigError, match="the known schedules are inference, gpipe, looped_bfs, 1f1b"):
        build("zzz", ranks=2, microbatches=2)


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(ConfigError, match="schedule 'gpipe' takes ranks, microbatches"):
        build("gpipe", ranks=2, microbatches=2, stages_per_rank=2)


@pytest.mark.parametrize(
    "sizes",
    [
        {"ranks": 0, "microbatches": 2},
        {"ranks": 2, "microbatches": -1},
        {"ranks": 2.0, "microbatches": 1},
        {"ranks": "2", "microbatches": 1},
        {"ranks": 2, "microbatches": 2, "stages_per_rank": 0},
    ],
)
def test_a_size_below_one_or_not_whole_is_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="a whole number of them, and at least one"):
        build("inference", **sizes)
