"""Full and failing disks, spoilt numbers and ends of single ranks: one cause, told on all ranks.

A run that ends goes on from its newest whole checkpoint, to the weights of an undisturbed one.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.train.checkpoints import NEWEST, newest_checkpoint
from support import tiny
from support.faults import (
    HOST,
    Row,
    assert_as_if_nothing_had_happened,
    attempt,
    steps_done,
    tree,
    went_on_from,
)
from support.strikes import Strike

pytestmark = pytest.mark.xdist_group("pool")


def goes_on(folder: Path, undisturbed: Path) -> int:
    """Resume, and compare with the undisturbed run. Returns the steps that were done again."""
    done = steps_done(folder)
    resumed = attempt(tree(folder), resume=NEWEST)
    assert list(resumed.codes.values()) == [0, 0], resumed.errors
    assert_as_if_nothing_had_happened(folder, undisturbed)
    return done - went_on_from(resumed.said[0])


# ---- Disks


@pytest.mark.sweep
@pytest.mark.fault("a disk is full", "at a byte of a checkpoint's files (RLIMIT_FSIZE)")
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("byte", [0, 1, 8, 500, 4000])
def test_a_disk_that_is_full_at_any_byte_costs_one_checkpoint(
    tmp_path: Path, undisturbed: Path, row: Row, byte: int, rank: int
) -> None:
    ended = attempt(tree(tmp_path), [Strike(rank, "the folder of a commit", 2, "fill", byte)])
    assert not ended.hung
    assert len(ended.errors) == 2
    for error in ended.errors.values():  # on rank 0 the rows of metrics may be the first that has no room
        assert error["kind"] in ("RunError", "PeerLostError")
        assert "File too large" in error["text"], error
    path = newest_checkpoint(tmp_path / "out").path
    assert path == tiny.checkpoint(tmp_path, 2)
    lost = goes_on(tmp_path, undisturbed)
    row.note(seconds=ended.seconds, cause=ended.cause, lost=lost)


@pytest.mark.sweep
@pytest.mark.fault("a disk is full", "a row of metrics (/dev/full)")
@pytest.mark.parametrize("nth", [6])
def test_a_disk_that_takes_no_row_ends_the_run_with_a_typed_error(
    tmp_path: Path, undisturbed: Path, row: Row, nth: int
) -> None:
    """0.5.0: OSError with a traceback on rank 0, and on the others that it had died: nobody told them."""
    ended = attempt(tree(tmp_path), [Strike(0, "a row of metrics", nth, "full")])
    file = tmp_path / "out" / "metrics.jsonl"
    rule = f"{file}: it cannot be written (No space left on device). Make room on that disk"
    assert ended.errors[0]["kind"] == "RunError"
    assert ended.errors[0]["text"].startswith(rule)
    assert f"rank 0 on {HOST} failed first: RunError: {rule}" in ended.errors[1]["text"]
    file.unlink()  # the strike put a link to the full device there
    resumed = attempt(tree(tmp_path), resume=NEWEST)
    assert list(resumed.codes.values()) == [0, 0], resumed.errors
    tiny.assert_same_tensors(tiny.checkpoint(tmp_path, 6), tiny.checkpoint(undisturbed, 6))
    row.note(seconds=ended.seconds, cause=ended.cause)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("point", "where"),
    [
        pytest.param(point, where, marks=pytest.mark.fault("a disk fails", where), id=where)
        for point, where in {
            "the moments of a commit": "as a checkpoint is written",
            "the manifest of a commit": "as its manifest is written",
            "the rename of a commit": "as it gets its name",
        }.items()
    ],
)
@pytest.mark.parametrize("axes", [{}, {"dp_replicate": 2}], ids=["pipeline", "mesh"])
def test_a_failed_background_write_ends_all_ranks_in_one_step_with_its_cause(
    tmp_path: Path, undisturbed: Path, row: Row, point: str, where: str, axes: dict[str, int]
) -> None:
    """0.5.0: at the next checkpoint, maybe hours later; and over a mesh the other pipelines were told that a
    rank had died."""
    struck = Strike(0, point, 2, "fail")
    ended = attempt(tree(tmp_path, parallel=axes), [struck])
    assert not ended.hung
    assert len(ended.errors) == len(ended.codes) == 2 * axes.get("dp_replicate", 1)
    for error in ended.errors.values():
        assert "Input/output error" in error["text"], error
    assert steps_done(tmp_path) < 6 or not tiny.checkpoint(tmp_path, 6).exists()
    lost: int | str = ""
    if not axes:
        lost = goes_on(tmp_path, undisturbed)
    row.note(seconds=ended.seconds, cause=ended.cause, lost=lost)


# ---- Numbers


SPOILT = {
    "a gradient of one rank is NaN": (Strike(1, "the norm", 4, "gradient"), f"not those of rank 1 on {HOST}"),
    "a weight becomes NaN between steps": (Strike(0, "the next step", 4, "weight"), "step 4: loss=nan"),
    "a number of a message becomes NaN": (
        Strike(1, "a stage's forward", 7, "message", 31),
        "step 4: loss=nan",
    ),
}


@pytest.mark.parametrize(
    "where",
    [
        pytest.param(
            each,
            id=each,
            marks=[
                pytest.mark.fault("a number is spoilt in memory", each),
                pytest.mark.sweep,
            ],
        )
        for each in SPOILT
    ],
)
def test_a_number_that_is_not_finite_ends_the_run_on_all_ranks(
    tmp_path: Path, undisturbed: Path, row: Row, where: str
) -> None:
    """0.5.0: a NaN gradient on rank 0 was told of rank 2, the first to say so."""
    strike, words = SPOILT[where]
    ended = attempt(tree(tmp_path), [strike])
    assert not ended.hung
    assert len(ended.errors) == 2
    for error in ended.errors.values():
        assert error["kind"] == "RunError"
        assert words in error["text"], error
    found = newest_checkpoint(tmp_path / "out").path
    assert found == tiny.checkpoint(tmp_path, 2)
    row.note(seconds=ended.seconds, cause=ended.cause, lost=goes_on(tmp_path, undisturbed))


@pytest.mark.sweep
@pytest.mark.fault("a number is spoilt in memory", "a bit of a message flips, with pipeline.checksums")
@pytest.mark.parametrize("bit", [20, 30])
def test_a_bit_of_a_message_ends_the_run_on_all_ranks(
    tmp_path: Path, undisturbed: Path, row: Row, bit: int
) -> None:
    """0.5.0: nobody noticed a number that stayed finite, and the run went on with it."""
    checked = tree(tmp_path, pipeline={"checksums": True})
    ended = attempt(checked, [Strike(1, "a message's arrival", 7, "message", bit)])
    assert not ended.hung
    assert ended.errors[1]["kind"] == "RunError"
    for error in ended.errors.values():
        assert f"from rank 0 on {HOST} to rank 1 on {HOST}" in error["text"], error
        assert "bits changed on the way" in error["text"], error
    row.note(seconds=ended.seconds, cause=ended.cause, lost=goes_on(tmp_path, undisturbed))


@pytest.mark.sweep
def test_without_checksums_a_bit_of_a_message_is_not_noticed(tmp_path: Path, undisturbed: Path) -> None:
    """TCP has a checksum, memory has its own or none."""
    ended = attempt(tree(tmp_path), [Strike(1, "a stage's forward", 7, "message", 20)])
    assert list(ended.codes.values()) == [0, 0], ended.errors
    with pytest.raises(AssertionError):
        tiny.assert_same_tensors(tiny.checkpoint(tmp_path, 6), tiny.checkpoint(undisturbed, 6))


# ---- Ends of one rank


ENDS = {
    "it gets SIGTERM": Strike(1, "the norm", 4, "terminate"),
    "it exits with code 0": Strike(1, "the norm", 4, "leave"),
    "it raises": Strike(1, "a forward", 7, "raise"),
}


@pytest.mark.sweep
@pytest.mark.parametrize(
    "where",
    [
        pytest.param(e, id=e, marks=pytest.mark.fault("a rank ends by itself or from outside", e))
        for e in ENDS
    ],
)
def test_a_rank_that_ends_is_named_by_the_other(
    tmp_path: Path, undisturbed: Path, row: Row, where: str
) -> None:
    """0.5.0: SIGTERM or a clean exit of one rank was "the other ranks"."""
    ended = attempt(tree(tmp_path), [ENDS[where]])
    assert not ended.hung
    assert f"rank 1 on {HOST}" in ended.errors[0]["text"]
    row.note(seconds=ended.seconds, cause=ended.cause, lost=goes_on(tmp_path, undisturbed))


# ---- What others do to the folder between two attempts


@pytest.mark.sweep
@pytest.mark.fault("the data change before --resume", "350 bytes are appended")
def test_changed_data_are_refused_on_all_ranks(tmp_path: Path, undisturbed: Path, row: Row) -> None:
    """0.5.0: 350 bytes that were appended changed all later batches, trained rows twice, and moved held-out
    rows into training: a checkpoint did not say which data it was of."""
    made = tree(tmp_path)
    attempt(made, [Strike(1, "a forward", 9)])
    with (tmp_path / "text").open("a") as text:
        text.write("more " * 70)
    refused = attempt(made, resume=NEWEST)
    assert len(refused.errors) == 2
    for error in refused.errors.values():
        assert error["kind"] == "CheckpointError", error
        assert "data" in error["text"]
    lost = goes_on(tmp_path, undisturbed)  # whose tree writes the text as it was
    row.note(seconds=refused.seconds, cause=refused.cause, lost=lost)
