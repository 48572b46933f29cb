import pytest

from penstock.schedule import render, simulate, verify
from penstock.schedule.builders.conformance import check_builder
from penstock.schedule.builders.hanayo import hanayo, list_schedule
from penstock.schedule.builders.interleaved_1f1b import interleaved_1f1b
from penstock.schedule.builders.one_f_one_b import one_f_one_b
from penstock.schedule.ops import Placement, wave
from support.orders import grid

SIZES = [(ranks, m, waves) for ranks in range(1, 8) for waves in (1, 2, 3) for m in range(1, 4 * ranks + 2)]


def bubble_time(ranks: int) -> int:
    """How long each rank idles, from m = 3P on."""
    return 3 * (ranks - 1)


def most_live(ranks: int, microbatches: int, waves: int) -> float:
    group = -(-microbatches // max(1, microbatches // ranks))
    more = 0 if waves == 1 else ranks / 3
    return min(2 * ranks - 1 + (2 * waves - 1) * group + more, 2 * waves * microbatches)


def test_golden() -> None:
    expected = """
        rank 0 | 0F0 0F1 0F2 3F0 3B0 3B0 3F1 3B1 3B1 .   0B0 0B0 3F2 3B2 3B2 0B1 0B1 .   .   0B2 0B2
        rank 1 | .   1F0 2F0 1F1 2F1 1F2 2B0 2B0 1B0 1B0 2F2 2B1 2B1 1B1 1B1 2B2 2B2 1B2 1B2 .   .
        """
    assert grid(render(hanayo(2, 3))) == grid(expected)


def test_golden_with_two_waves() -> None:
    expected = """
    rank 0 | 0F0 .   .   3F0 4F0 .   .   7F0 7B0 7B0 .   .   .   .   4B0 4B0 3B0 3B0 .   .   .   .   0B0 0B0
    rank 1 | .   1F0 2F0 .   .   5F0 6F0 .   .   .   6B0 6B0 5B0 5B0 .   .   .   .   2B0 2B0 1B0 1B0 .   .
    """
    assert grid(render(hanayo(2, 1, waves=2))) == grid(expected)


@pytest.mark.parametrize("waves", [1, 2, 3])
def test_conforms(waves: int) -> None:
    check_builder(
        hanayo,
        ranks=range(1, 7),
        microbatches=range(1, 14),
        placement=lambda ranks: wave(ranks, 2 * waves),
        waves=waves,
    )


def test_the_bubble() -> None:
    for ranks, microbatches, waves in SIZES:
        timeline = simulate(hanayo(ranks, microbatches, waves))
        extra = timeline.makespan - 6 * waves * microbatches - bubble_time(ranks)
        if microbatches >= 3 * ranks:
            assert extra == 0
            assert timeline.bubble == pytest.approx((ranks - 1) / (2 * waves * microbatches + ranks - 1))
        elif microbatches >= 2 * ranks:
            assert extra <= (ranks / 6 if waves == 1 else 0)
        elif microbatches >= ranks:
            assert extra <= 3 * ranks / 2


def test_one_unit_of_p_microbatches_in_one_wave() -> None:
    for ranks in range(2, 17):
        assert simulate(hanayo(ranks, ranks)).makespan == 6 * ranks + 4 * (ranks - 1)


def test_live_activations() -> None:
    for ranks, microbatches, waves in SIZES:
        live = verify(hanayo(ranks, microbatches, waves)).peak_live
        assert max(live) <= most_live(ranks, microbatches, waves)
        if waves == 1 and microbatches % ranks == 0 and microbatches > ranks:
            assert max(live) == 3 * ranks - 1


def test_live_activations_do_not_grow_with_the_microbatches() -> None:
    for ranks, waves in [(4, 1), (4, 3), (8, 2)]:
        few, many = (max(verify(hanayo(ranks, m * ranks, waves)).peak_live) for m in (4, 40))
        assert few == many


@pytest.mark.parametrize("waves", [1, 2])
def test_it_takes_as_long_as_interleaved_1f1b_and_less_than_1f1b(waves: int) -> None:
    for ranks in range(2, 9):
        for microbatches in (3 * ranks, 3 * ranks + 1, 5 * ranks):
            ours = simulate(hanayo(ranks, microbatches, waves))
            looped = simulate(interleaved_1f1b(ranks, microbatches, 2 * waves))
            assert ours.makespan == looped.makespan
            assert ours.bubble < simulate(one_f_one_b(ranks, microbatches)).bubble


def test_list_scheduling_takes_the_lowest_number_that_is_ready() -> None:
    """The second microbatch, numbered first, goes first; a step that is ready later waits for none."""
    programs = list_schedule(Placement((0, 1)), [9, 0])
    assert [" ".join(map(str, program)) for program in programs] == ["0F1 0F0 0B1 0B0", "1F1 1B1 1F0 1B0"]


def test_sends_that_need_a_buffer_are_few() -> None:
    for ranks in range(2, 7):
        for microbatches in range(1, 4 * ranks):
            assert verify(hanayo(ranks, microbatches)).buffered_sends <= 2
