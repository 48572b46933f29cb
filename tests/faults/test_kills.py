"""A rank is killed at each point of a run: the others end in seconds, and --resume trains the same weights.

Faults of version 0.5.0, all survived there too: this is the matrix that keeps it so.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.train.checkpoints import NEWEST
from support.faults import (
    HOST,
    TIMEOUT,
    Row,
    assert_as_if_nothing_had_happened,
    attempt,
    steps_done,
    tree,
    went_on_from,
)
from support.strikes import Strike

pytestmark = pytest.mark.xdist_group("pool")

# the rank, the point, the number of its calls; a part runs in the default suite
KILLS = [
    Strike(1, "the look for a checkpoint"),
    Strike(0, "the taking of the folder"),
    Strike(1, "the job's group"),
    Strike(1, "the handshake"),
    Strike(1, "the mesh"),
    Strike(1, "the groups"),
    Strike(0, "the build"),
    Strike(1, "the writer's group"),
    Strike(1, "a forward", 7),
    Strike(0, "a backward", 8),
    Strike(1, "the norm", 4),
    Strike(0, "the optimizer", 5),
    Strike(0, "a row of metrics", 6),
    Strike(1, "an evaluation", 3),
    Strike(0, "a save", 2),
    Strike(0, "the folder of a commit", 2),
    Strike(1, "the weights of a commit", 2),
    Strike(1, "the moments of a commit", 2),
    Strike(0, "the hashes of a commit", 2),
    Strike(0, "the manifest of a commit", 2),
    Strike(0, "the rename of a commit", 2),
    Strike(0, "what follows a commit", 2),
    Strike(0, "the removal of an older one"),
]
# before a rank has joined, nothing says that it is gone: its peers wait, until a launcher ends them
UNKNOWN = KILLS[:2]
NOTICED = 10.0  # seconds in which the others end, whatever the timeout
DEFAULT = ("the rename of a commit",)


def parameters(strikes: list[Strike]) -> list[object]:
    def marks(strike: Strike) -> list[pytest.MarkDecorator]:
        fault = pytest.mark.fault("a rank is killed, then --resume", strike.point)
        return [fault] if strike.point in DEFAULT else [fault, pytest.mark.sweep]

    return [pytest.param(strike, marks=marks(strike), id=strike.point) for strike in strikes]


@pytest.mark.sweep
@pytest.mark.parametrize("strike", parameters(KILLS))
def test_a_killed_rank_costs_the_steps_since_the_newest_checkpoint(
    tmp_path: Path, undisturbed: Path, row: Row, strike: Strike
) -> None:
    made = tree(tmp_path, timeout=4.0 if strike in UNKNOWN else TIMEOUT)
    killed = attempt(made, [strike])
    assert not killed.hung
    assert killed.codes[strike.rank] == -9, killed.said
    error = killed.errors[1 - strike.rank]
    assert error["kind"] in ("PeerLostError", "StalledPeerError", "RunError"), error
    assert f"rank {strike.rank}" in error["text"]
    assert killed.seconds < NOTICED
    done = steps_done(tmp_path)
    resumed = attempt(made, resume=NEWEST)
    assert list(resumed.codes.values()) == [0, 0], resumed.errors
    assert_as_if_nothing_had_happened(tmp_path, undisturbed)
    began = went_on_from(resumed.said[0])
    assert done - began <= 4  # a checkpoint every second step, which is written while the next two run
    row.note(seconds=killed.seconds, cause=killed.cause, lost=max(0, done - began))


@pytest.mark.sweep
@pytest.mark.parametrize("point", ["the mesh", "the reductions"])
@pytest.mark.fault("a rank is killed, then --resume", "the making of a mesh of two axes")
def test_a_rank_that_is_killed_while_groups_of_a_mesh_are_made_is_noticed_in_seconds(
    tmp_path: Path, row: Row, point: str
) -> None:
    """0.5.0: after the timeout, as torch waits that long for each rank to join a group."""
    killed = attempt(tree(tmp_path, parallel={"dp_shard": 2}), [Strike(1, point)])
    assert not killed.hung
    assert sorted(killed.errors) == [0, 2, 3]
    assert all(f" on {HOST} failed first: it ended" in error["text"] for error in killed.errors.values())
    assert killed.seconds < NOTICED
    row.note(seconds=killed.seconds, cause=killed.cause, lost=0)


@pytest.mark.sweep
@pytest.mark.fault("a rank is killed, then --resume", "the load of a checkpoint, in a restart")
def test_a_rank_that_is_killed_in_a_restart_costs_nothing_more(
    tmp_path: Path, undisturbed: Path, row: Row
) -> None:
    made = tree(tmp_path)
    attempt(made, [Strike(1, "a forward", 9)])
    again = attempt(made, [Strike(1, "the load of a checkpoint")], NEWEST)
    assert not again.hung
    assert again.codes[1] == -9
    assert f"rank 1 on {HOST}" in again.errors[0]["text"]
    resumed = attempt(made, resume=NEWEST)
    assert list(resumed.codes.values()) == [0, 0], resumed.errors
    assert_as_if_nothing_had_happened(tmp_path, undisturbed)
    row.note(seconds=again.seconds, cause=again.cause, lost=0)
