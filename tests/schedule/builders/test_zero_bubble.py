import pytest
from benchmarks.validation.zero_bubble import FITTED, TABLE_5, TABLE_8, LoopRow, VRow, predicted

from penstock.schedule import Costs, simulate
from penstock.schedule.builders.zero_bubble import zb_h1, zb_h2


def test_one_microbatch_fewer_than_zb_h2_needs_and_a_rank_pauses() -> None:
    for ranks in range(2, 9):
        assert simulate(zb_h2(ranks, 2 * ranks - 2)).inner_bubble > 0


@pytest.mark.parametrize(("f", "i", "w"), [(1, 1, 1), (1, 1.25, 0.75), (2, 2.5, 1), (1, 2, 0.2), (3, 3, 2)])
def test_in_zb_h2_ranks_idle_as_the_paper_says(f: float, i: float, w: float) -> None:
    for ranks in range(2, 8):
        for microbatches in (2 * ranks - 1, 2 * ranks, 3 * ranks):
            timeline = simulate(zb_h2(ranks, microbatches), Costs(f, i, w))
            idle = [
                spans[-1].end - spans[0].start - microbatches * (f + i + w)
                for spans in map(timeline.of_rank, range(ranks))
            ]
            assert max(idle) == pytest.approx((ranks - 1) * (f + i - 2 * w))


def test_zb_h2_pauses_no_more_than_zb_h1() -> None:
    for ranks in range(1, 8):
        for microbatches in (1, ranks, 2 * ranks - 1, 3 * ranks):
            ours, other = simulate(zb_h2(ranks, microbatches)), simulate(zb_h1(ranks, microbatches))
            assert ours.inner_bubble <= other.inner_bubble + 1e-12


@pytest.mark.parametrize("row", TABLE_5, ids=lambda row: f"{row.model}, {row.microbatches} microbatches")
def test_the_bubbles_are_those_of_the_paper(row: LoopRow) -> None:
    """Table 5 at the costs of Table 9, to all four digits."""
    assert {name: round(predicted(row, name), 4) for name in row.rates} == row.rates


@pytest.mark.parametrize(
    "row", TABLE_8, ids=lambda row: f"{row.ranks} ranks, {row.microbatches} microbatches"
)
def test_the_costs_that_the_paper_does_not_print_give_its_bubbles(row: VRow) -> None:
    """Table 8: two columns that determine the costs, and ZB-H2, which they predict."""
    for name in FITTED:
        assert predicted(row, name) == pytest.approx(row.rates[name], abs=1e-4)
    assert predicted(row, "zb_h2") == pytest.approx(row.rates["zb_h2"], abs=1.5e-4)
