import pytest

from penstock.schedule import Op, Span, Timeline

SPANS = (
    Span(0, Op(0, "F", 0), 10.0, 11.0),
    Span(0, Op(0, "B", 0), 15.0, 18.0),
    Span(1, Op(1, "F", 0), 12.0, 13.0),
    Span(1, Op(1, "B", 0), 13.0, 15.0),
)


def test_the_clock_may_start_anywhere() -> None:
    timeline = Timeline("mine", 2, SPANS, (1, 1))
    assert (timeline.start, timeline.makespan) == (10.0, 8.0)


def test_the_bubble_is_the_share_of_time_that_is_idle() -> None:
    timeline = Timeline("mine", 2, SPANS, (1, 1))
    assert timeline.busy == (4.0, 3.0)
    assert timeline.rank_bubble == (0.5, 0.625)
    assert timeline.bubble == pytest.approx(1 - 7 / 16)


def test_the_spans_of_one_rank() -> None:
    assert Timeline("mine", 2, SPANS, (1, 1)).of_rank(1) == SPANS[2:]


def test_an_empty_timeline_has_no_bubble() -> None:
    empty = Timeline("mine", 2, (), (0, 0))
    assert (empty.makespan, empty.bubble, empty.rank_bubble) == (0.0, 0.0, (0.0, 0.0))
