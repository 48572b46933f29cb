"""A rank stands still in each phase of a run: the others end within the timeout and 5 s, and name it."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.train.checkpoints import NEWEST
from support.faults import HOST, Attempt, Row, assert_as_if_nothing_had_happened, attempt, tree
from support.strikes import Strike

pytestmark = [pytest.mark.sweep, pytest.mark.xdist_group("pool")]

TIMEOUT = 2.0
PHASES = {
    "start-up, before the ranks meet": Strike(1, "the data"),
    "start-up, as the ranks meet": Strike(1, "the joining"),
    "the handshake": Strike(1, "the handshake"),
    "the making of groups": Strike(1, "the groups"),
    "the build": Strike(1, "the build"),
    "the making of the writer's group": Strike(1, "the writer's group"),
    "the first step": Strike(1, "a forward"),
    "a step": Strike(0, "a backward", 8),
    "the norm": Strike(1, "the norm", 4),
    "the optimizer": Strike(0, "the optimizer", 4),
    "an evaluation": Strike(1, "an evaluation", 3),
    "a checkpoint in the background": Strike(1, "the moments of a commit", 2),
    "a checkpoint in the foreground": Strike(1, "the moments of a commit", 2),
    "the publication of a checkpoint": Strike(0, "the rename of a commit", 2),
}


def assert_named(ended: Attempt, rank: int) -> None:
    other = ended.errors[1 - rank]
    assert other["kind"] in ("StalledPeerError", "PeerLostError"), other
    assert f"rank {rank} on {HOST} has been silent" in other["text"] or (
        f"rank {rank} did not come within" in other["text"]
    ), other


@pytest.mark.parametrize(
    ("phase", "strike"),
    [
        pytest.param(p, s, id=p, marks=pytest.mark.fault("a rank stands still, timeout 2 s", p))
        for p, s in PHASES.items()
    ],
)
def test_a_rank_that_stands_still_is_named_in_time(
    tmp_path: Path, row: Row, phase: str, strike: Strike
) -> None:
    """0.5.0: hangs of minutes in start-up, as groups were made and away from the store; SIGABRT of a healthy
    rank in a foreground checkpoint. Calls of torch had no time limit, or that of a disk."""
    background = phase != "a checkpoint in the foreground"
    made = tree(tmp_path, timeout=TIMEOUT, train={"checkpoint_background": background})
    ended = attempt(made, [strike._replace(deed="stop")])
    assert not ended.hung
    assert_named(ended, strike.rank)
    assert ended.seconds < TIMEOUT + 5
    row.note(seconds=ended.seconds, cause=ended.cause)


@pytest.mark.fault("a rank stands still, timeout 2 s", "the load of a checkpoint, in a restart")
def test_a_rank_that_stands_still_in_a_restart_is_named_and_the_next_one_goes_on(
    tmp_path: Path, undisturbed: Path, row: Row
) -> None:
    attempt(tree(tmp_path), [Strike(1, "a forward", 9)])
    again = attempt(
        tree(tmp_path, timeout=TIMEOUT), [Strike(1, "the load of a checkpoint", deed="stop")], NEWEST
    )
    assert not again.hung
    assert_named(again, 1)
    assert again.seconds < TIMEOUT + 5
    assert list(attempt(tree(tmp_path), resume=NEWEST).codes.values()) == [0, 0]
    assert_as_if_nothing_had_happened(tmp_path, undisturbed)
    row.note(seconds=again.seconds, cause=again.cause, lost=0)


@pytest.mark.fault("clocks differ", "by an hour, over a whole run")
def test_clocks_that_differ_change_nothing(tmp_path: Path, undisturbed: Path, row: Row) -> None:
    """0.5.0: a clock 20 s behind blamed a healthy rank: notes were judged by the wall clock in them."""
    strike = Strike(1, "the look for a checkpoint", deed="clock", number=3600)
    ended = attempt(tree(tmp_path, timeout=TIMEOUT), [strike])
    assert list(ended.codes.values()) == [0, 0], ended.errors
    assert_as_if_nothing_had_happened(tmp_path, undisturbed)
    row.note(cause="nothing to name", lost=0)


@pytest.mark.fault("clocks differ", "by 20 s, and the other rank stands still")
def test_of_a_rank_that_stands_still_and_one_whose_clock_is_wrong_the_first_is_named(
    tmp_path: Path, row: Row
) -> None:
    """0.5.0: the one with the wrong clock."""
    wrong = Strike(0, "the look for a checkpoint", deed="clock", number=-20)
    stopped = Strike(1, "a forward", 7, deed="stop")
    ended = attempt(tree(tmp_path, timeout=TIMEOUT), [wrong, stopped])
    assert not ended.hung
    assert_named(ended, 1)
    row.note(cause=ended.cause)
