"""The machine under a run: its folder goes, memory and files run out, clocks jump, a rank stands still.

Each ends in seconds with its first cause, or nobody notices it.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.train.checkpoints import NEWEST
from support.faults import (
    HOST,
    STEPS,
    Attempt,
    Row,
    assert_as_if_nothing_had_happened,
    attempt,
    steps_done,
    tree,
    went_on_from,
)
from support.strikes import CONTROL_GROUP, Strike, thaw
from support.tiny import assert_same_tensors, checkpoint

pytestmark = [pytest.mark.sweep, pytest.mark.xdist_group("pool")]

DAY = 86_400


def as_root(*command: str) -> bool:
    """Whether this works here: in a container it may be forbidden."""
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


# ---- A rank stands still for a while


@pytest.mark.fault("a rank stands still for a while", "3 s, timeout 20 s")
def test_a_pause_that_is_shorter_than_the_timeout_changes_nothing(
    tmp_path: Path, undisturbed: Path, row: Row
) -> None:
    ended = attempt(tree(tmp_path), [Strike(1, "a forward", 7, "pause", 3)])
    assert list(ended.codes.values()) == [0, 0], ended.errors
    assert_as_if_nothing_had_happened(tmp_path, undisturbed)
    row.note(cause="nothing to name", lost=0)


@pytest.mark.fault("a rank stands still for a while", "8 s, timeout 2 s")
def test_a_rank_that_comes_back_after_the_timeout_ends_too(
    tmp_path: Path, undisturbed: Path, row: Row
) -> None:
    """It must not go on alone: the others may have started again by then."""
    ended = attempt(tree(tmp_path, timeout=2.0), [Strike(1, "a forward", 7, "pause", 8)])
    assert not ended.hung
    assert list(ended.codes.values()) == [1, 1], ended.said
    assert f"rank 1 on {HOST} has been silent" in ended.errors[0]["text"]
    assert ended.errors[1]["kind"] in ("PeerLostError", "StalledPeerError")
    assert ended.seconds < 2 + 5
    done = steps_done(tmp_path)
    resumed = attempt(tree(tmp_path), resume=NEWEST)
    assert list(resumed.codes.values()) == [0, 0], resumed.errors
    assert_as_if_nothing_had_happened(tmp_path, undisturbed)
    row.note(seconds=ended.seconds, cause=ended.cause, lost=done - went_on_from(resumed.said[0]))


# ---- The run's folder


@pytest.fixture
def thawed(tmp_path: Path) -> Iterator[None]:
    (tmp_path / "tried").touch()
    if not as_root("chattr", "+i", str(tmp_path / "tried")):
        pytest.skip("chattr +i needs root, and a file system that knows it")
    as_root("chattr", "-i", str(tmp_path / "tried"))
    yield
    thaw(tmp_path)


def ends_for_its_folder(ended: Attempt) -> None:
    assert not ended.hung
    assert list(ended.codes.values()) == [1, 1], ended.said
    assert "out" in ended.errors[0]["text"], ended.errors
    assert "rank 0" in ended.errors[1]["text"] or "process 0" in ended.errors[1]["text"], ended.errors
    assert ended.seconds < 10


@pytest.mark.parametrize("deed", ["remove", "replace"])
@pytest.mark.fault("the run's folder goes", "it is removed, or a file has its place")
def test_a_run_whose_folder_goes_ends_and_names_it(
    tmp_path: Path, undisturbed: Path, row: Row, deed: str
) -> None:
    ended = attempt(tree(tmp_path), [Strike(0, "the optimizer", 3, deed)])
    ends_for_its_folder(ended)
    if deed == "replace":
        (tmp_path / "out").unlink()
        (tmp_path / "moved").rename(tmp_path / "out")
    again = attempt(tree(tmp_path), resume=NEWEST)
    assert list(again.codes.values()) == [0, 0], again.errors
    if deed == "replace":
        assert_as_if_nothing_had_happened(tmp_path, undisturbed)
    else:  # the rows are gone; a checkpoint that was being written may have come back
        assert_same_tensors(checkpoint(tmp_path, STEPS), checkpoint(undisturbed, STEPS))
    row.note(seconds=ended.seconds, cause=ended.cause, lost=3 - went_on_from(again.said[0]))


@pytest.mark.usefixtures("thawed")
@pytest.mark.fault("the run's folder goes", "nobody may write in it any more")
def test_a_run_whose_folder_becomes_read_only_ends_and_names_it(
    tmp_path: Path, undisturbed: Path, row: Row
) -> None:
    ended = attempt(tree(tmp_path), [Strike(0, "the optimizer", 3, "freeze")])
    thaw(tmp_path)
    ends_for_its_folder(ended)
    again = attempt(tree(tmp_path), resume=NEWEST)
    assert list(again.codes.values()) == [0, 0], again.errors
    assert_as_if_nothing_had_happened(tmp_path, undisturbed)
    row.note(seconds=ended.seconds, cause=ended.cause, lost=3 - went_on_from(again.said[0]))


# ---- Memory and files run out


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.fault("a process runs out", "of memory: ulimit -v, in a step")
def test_a_rank_that_gets_no_more_memory_says_so(tmp_path: Path, row: Row, rank: int) -> None:
    ended = attempt(tree(tmp_path), [Strike(rank, "a forward", 7, "starve", 512)])
    assert not ended.hung
    assert "ulimit -v" in ended.errors[rank]["text"]
    assert f"rank {rank} on {HOST} failed first" in ended.errors[1 - rank]["text"]
    assert "allocate memory" in ended.errors[1 - rank]["text"]
    assert ended.seconds < 10
    row.note(seconds=ended.seconds, cause=ended.cause)


@pytest.mark.parametrize("point", ["the joining", "the writer's group"])
@pytest.mark.fault("a process runs out", "of files: ulimit -n, as groups are made")
def test_a_rank_that_may_open_no_more_files_says_so_and_blames_nobody(
    tmp_path: Path, row: Row, point: str
) -> None:
    """0.5.0: with 24 descriptors another rank was blamed, and the log never said descriptors."""
    ended = attempt(tree(tmp_path), [Strike(1, point, deed="files", number=1)])
    assert not ended.hung
    assert "ulimit -n" in ended.errors[1]["text"], ended.errors
    assert f"rank 1 on {HOST} failed first" in ended.errors[0]["text"], ended.errors
    assert "ulimit -n" in ended.errors[0]["text"]
    assert ended.seconds < 10
    row.note(seconds=ended.seconds, cause=ended.cause)


@pytest.fixture
def control_group() -> Iterator[None]:
    """A control group of 64 MiB, in which the kernel kills."""
    try:
        CONTROL_GROUP.mkdir()
        (CONTROL_GROUP / "memory.limit_in_bytes").write_text(str(1 << 26))
    except OSError as error:
        pytest.skip(f"no control group of memory can be made here ({error})")
    yield
    CONTROL_GROUP.rmdir()


@pytest.mark.usefixtures("control_group")
@pytest.mark.fault("a process runs out", "of memory: the kernel kills it, in a step")
def test_of_a_rank_that_the_kernel_kills_the_others_say_why(tmp_path: Path, row: Row) -> None:
    ended = attempt(tree(tmp_path), [Strike(1, "a forward", 7, "memory")])
    assert not ended.hung
    assert ended.codes[1] == -9
    assert "as memory ran out" in ended.errors[0]["text"], ended.errors
    assert ended.seconds < 10
    row.note(seconds=ended.seconds, cause=ended.cause)


# ---- Clocks


@pytest.mark.parametrize("jump", [DAY, -DAY])
@pytest.mark.fault("clocks differ", "they jump by a day in a step, ahead or back")
def test_clocks_that_jump_change_nothing(tmp_path: Path, undisturbed: Path, row: Row, jump: int) -> None:
    jumps = [Strike(rank, "a forward", 7, "clock", jump) for rank in (0, 1)]
    ended = attempt(tree(tmp_path, timeout=5.0), jumps)
    assert list(ended.codes.values()) == [0, 0], ended.errors
    assert_as_if_nothing_had_happened(tmp_path, undisturbed)
    row.note(cause="nothing to name", lost=0)
