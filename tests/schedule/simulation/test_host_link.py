"""A rank's link to host memory: a slow one holds up its rank, and each direction is a queue of its own."""

from __future__ import annotations

from itertools import pairwise

from penstock.schedule import Costs, build, simulate
from penstock.schedule.simulation.timeline import Copy


def test_a_slow_link_holds_up_its_rank() -> None:
    """One rank, GPipe, worked out by hand: forwards of 1, backwards of 2, copies of 3."""
    costs = Costs(activation=5.0, offloaded=3.0, host_bandwidth=1.0)
    timeline = simulate(build("gpipe", ranks=1, microbatches=4), costs)
    assert [(str(span.op), span.start, span.end) for span in timeline.spans] == [
        ("0F0", 0, 1),
        ("0F1", 1, 2),
        ("0F2", 4, 5),  # 0F0 is released at 4, after two thirds of its copy in which nothing ran
        ("0F3", 7, 8),  # 0F1 at 7
        ("0B0", 10, 12),  # 0F2 at 10, and 0F0 is back
        ("0B1", 13, 15),  # 0F3 is released at 13, and 0F1 is back
        ("0B2", 16, 18),
        ("0B3", 19, 21),
    ]
    assert timeline.copies == (
        Copy(0, 0, 0, False, 1, 4, stalled=2),
        Copy(0, 0, 1, False, 4, 7, stalled=2),
        Copy(0, 0, 2, False, 7, 10, stalled=2),
        Copy(0, 0, 0, True, 7, 10, stalled=0),
        Copy(0, 0, 3, False, 10, 13, stalled=1),
        Copy(0, 0, 1, True, 10, 13, stalled=0),
        Copy(0, 0, 2, True, 13, 16, stalled=1),
        Copy(0, 0, 3, True, 16, 19, stalled=1),
    )
    assert [*timeline.stalled] == [9]
    assert timeline.idle[0].runtime == 9


def test_each_direction_is_a_queue_of_its_own() -> None:
    """Copies of one direction follow each other; those of the two run at once."""
    timeline = simulate(
        build("gpipe", ranks=1, microbatches=8), Costs(activation=1.0, offloaded=1.0, host_bandwidth=0.4)
    )
    for up in (False, True):
        ways = sorted((copy.start, copy.end) for copy in timeline.copies if copy.up is up)
        assert len(ways) == 8
        assert all(end <= start for (_, end), (start, _) in pairwise(ways))
    downs, ups = ([copy for copy in timeline.copies if copy.up is up] for up in (False, True))
    assert any(max(a.start, b.start) < min(a.end, b.end) for a in downs for b in ups)
