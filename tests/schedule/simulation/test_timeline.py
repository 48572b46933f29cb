from math import inf

import pytest

from penstock.errors import ConfigError
from penstock.schedule import Idle, Op, Pair, Reduction, Span, Timeline, Wait
from penstock.schedule.simulation.timeline import check_objective, measure_of
from support.refusals import refuses

SPANS = (
    Span(0, Op(0, "F", 0), 10.0, 11.0),
    Span(0, Op(0, "B", 0), 15.0, 18.0),
    Span(1, Op(1, "F", 0), 12.0, 13.0),
    Span(1, Op(1, "B", 0), 13.0, 15.0),
)


def test_the_bubble_is_the_share_of_time_that_is_idle_whenever_the_clock_started() -> None:
    timeline = Timeline("mine", 2, SPANS, (1, 1))
    assert timeline.of_rank(1) == SPANS[2:]
    assert (timeline.start, timeline.makespan) == (10.0, 8.0)
    assert timeline.busy == (4.0, 3.0)
    assert timeline.rank_bubble == (0.5, 0.625)
    assert timeline.bubble == pytest.approx(1 - 7 / 16)


def test_the_extent_is_the_longest_time_from_a_rank_s_own_start_to_its_own_end() -> None:
    timeline = Timeline("mine", 2, SPANS, (1, 1))
    assert timeline.rank_extent == (8.0, 3.0)
    assert timeline.extent == 8.0
    shifted = Timeline("mine", 2, (*SPANS[:2], *(span._replace(end=20.0) for span in SPANS[3:])), (1, 1))
    assert (shifted.makespan, shifted.extent) == (10.0, 8.0)
    assert (shifted.length("makespan"), shifted.length("extent")) == (10.0, 8.0)


def test_the_longest_rank_counts_in_the_extent_bubble_and_the_average_one_in_the_inner_bubble() -> None:
    timeline = Timeline("mine", 2, SPANS, (1, 1))
    assert timeline.extent_bubble == 1 - 7 / 16
    assert timeline.inner_bubble == pytest.approx(1 - 7 / 11)


def test_a_reduction_belongs_to_the_extent_of_its_rank() -> None:
    timeline = Timeline("mine", 2, SPANS, (1, 1), reductions=(Reduction(1, 1, 15.0, 21.0),))
    assert timeline.rank_extent == (8.0, 9.0)
    assert timeline.extent == 9.0


def test_a_step_that_all_ranks_end_together_takes_its_makespan() -> None:
    assert measure_of() == "makespan"
    assert measure_of(reports=False) == "extent"
    assert measure_of(reports=False, max_norm=1.0) == "makespan"
    assert measure_of(reports=False, max_norm=inf, checks_gradients=True) == "makespan"


def test_there_are_two_objectives() -> None:
    check_objective("makespan")
    check_objective("extent")
    with refuses(ConfigError, "objective='bubble'"):
        check_objective("bubble")


def test_what_runs_side_by_side_counts_once_whichever_began_first() -> None:
    for start, busy in ((11.5, 5.0), (10.5, 5.5)):
        forward, backward = Span(0, Op(0, "F", 1), 11.0, 13.0), Span(0, Op(0, "B", 0), start, 16.0)
        overlaps = frozenset({Pair(forward.op, backward.op)})
        timeline = Timeline("mine", 1, (forward, backward), (2,), overlaps=overlaps)
        assert timeline.busy == (busy,)
        assert timeline.side_by_side == {forward.op, backward.op}


def test_busy_time_is_divided_between_the_device_and_its_waits_for_the_host() -> None:
    timeline = Timeline("mine", 2, SPANS, (1, 1), host_bound=(1.0, 2.0))
    assert timeline.device_busy == (3.0, 1.0)
    assert timeline.rank_host_share == (0.125, 0.25)
    assert timeline.host_share == 3 / 16
    assert sum(timeline.device_busy) / 16 + 3 / 16 + timeline.bubble == pytest.approx(1)
    unknown = Timeline("mine", 2, SPANS, (1, 1))
    assert (unknown.device_busy, unknown.rank_host_share, unknown.host_share) == ((4.0, 3.0), (), None)


def test_an_empty_timeline_has_no_bubble() -> None:
    empty = Timeline("mine", 2, (), (0, 0))
    assert (empty.makespan, empty.bubble, empty.rank_bubble) == (0.0, 0.0, (0.0, 0.0))
    assert (empty.extent, empty.extent_bubble) == (0.0, 0.0)


WAITS = (
    Wait(0, Op(0, "B", 0), 11.0, 14.5, 13.5),
    Wait(1, Op(1, "F", 0), 9.0, 12.0, 11.0),
)


def test_idle_time_is_split_by_its_cause() -> None:
    """Rank 0 ends F at 11, waits for its peer until 13.5 and for the wire until 14.5, and goes on at 15."""
    timeline = Timeline("mine", 2, SPANS, (1, 1), waits=WAITS)
    assert timeline.inner_waits == WAITS[:1]
    assert timeline.idle == (
        Idle(peer=2.5, wire=1.0, runtime=0.5, outside=0.0),
        Idle(peer=0.0, wire=0.0, runtime=0.0, outside=5.0),  # its wait lies before its first op
    )


@pytest.mark.parametrize(("sent", "turn"), [(5.0, 11.0), (12.0, 12.0), (15.0, 14.0)])
def test_a_wait_turns_from_the_peer_to_the_wire_when_it_was_sent(sent: float, turn: float) -> None:
    """Clocks of two ranks differ a little: what was sent before the wait began is all wire."""
    assert Wait(0, Op(0, "B", 0), 11.0, 14.0, sent).turn == turn


def test_a_step_lasts_until_its_gradients_are_summed() -> None:
    """Rank 0 ends its last backward at 18 and sums until 20, rank 1 from 15 to 16, when rank 0 computes."""
    reductions = (Reduction(0, 0, 18.0, 20.0), Reduction(1, 1, 15.0, 16.0))
    timeline = Timeline("mine", 2, SPANS, (1, 1), waits=WAITS, reductions=reductions)
    assert timeline.makespan == 10.0
    assert timeline.busy == (4.0, 3.0)
    assert timeline.idle == (
        Idle(peer=2.5, wire=1.0, runtime=0.5, outside=0.0, reduce=2.0),
        Idle(peer=0.0, wire=0.0, runtime=0.0, outside=6.0, reduce=1.0),
    )
    assert timeline.rank_inner_bubble == pytest.approx((0.6, 0.25))


def test_gaps_that_nobody_took_note_of_are_the_runtimes() -> None:
    timeline = Timeline("mine", 3, SPANS, (1, 1, 0))
    assert timeline.idle[0] == Idle(0.0, 0.0, runtime=4.0, outside=0.0)
    assert timeline.idle[2] == Idle(0.0, 0.0, 0.0, outside=8.0)  # it has nothing to do
