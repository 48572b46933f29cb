"""Writes in the background: failures are raised, and none outlives what waits for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.checkpoint.optimizer_state import OptimizerState
from penstock.checkpoint.save_load import CheckpointWriter, load_checkpoint, save_checkpoint
from penstock.errors import RunError
from penstock.models.weights.folder import Hashed
from support.folders import check_folder
from support.jobs_checkpoint import failing_writes
from support.refusals import refuses
from support.writing import Made, writers


def test_one_checkpoint_is_written_at_a_time(tmp_path: Path, alone: Made) -> None:
    pipe, optimizers = alone
    with CheckpointWriter(pipe) as writer:
        for number in range(3):
            writer.save(tmp_path / str(number), optimizers, {"number": number})
            assert len(writers()) <= 1
            if number:
                check_folder(tmp_path / str(number - 1))
    for number in range(3):
        assert load_checkpoint(tmp_path / str(number), pipe, optimizers) == {"number": number}


@pytest.mark.parametrize("how", ["next", "wait", "context"])
def test_a_failure_in_the_background_is_raised(tmp_path: Path, how: str, alone: Made) -> None:
    pipe, optimizers = alone
    path = tmp_path / "checkpoint"
    save_checkpoint(path, pipe, optimizers, {"step": 1})
    writer = CheckpointWriter(pipe)
    raises: dict[str, Callable[[], None]] = {
        "next": lambda: writer.save(path, optimizers),
        "wait": writer.wait,
        "context": lambda: writer.__exit__(None, None, None),
    }
    with failing_writes(0):
        writer.save(path, optimizers, {"step": 2})
        with refuses(RunError, rule="background: OSError: disk full"):
            raises[how]()
    assert load_checkpoint(path, pipe, optimizers) == {"step": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint"]
    writer.save(path, optimizers, {"step": 3})  # the failure was raised, and this write is another
    writer.wait()
    assert load_checkpoint(path, pipe, optimizers) == {"step": 3}


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_error_elsewhere_lets_a_checkpoint_end_and_ctrl_c_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: Made, error: type[BaseException], fails: bool
) -> None:
    """0.4.0 lost what had gone wrong in the background when the loop failed as well."""
    pipe, optimizers = alone
    written = OptimizerState.write

    def slowly(self: OptimizerState, folder: Path, index: int, count: int) -> Hashed:
        time.sleep(0.2)
        if fails:
            raise OSError("disk full")
        return written(self, folder, index, count)

    monkeypatch.setattr(OptimizerState, "write", slowly)
    with pytest.raises(error) as caught, CheckpointWriter(pipe) as writer:  # noqa: PT012
        writer.save(tmp_path / "checkpoint", optimizers)
        raise error
    assert writers() == []
    whole = error is ValueError and not fails
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint"] * whole
    if not whole:
        (note,) = caught.value.__notes__
        why = "OSError: disk full" if error is ValueError else "it was abandoned"
        assert note.startswith(f"checkpoint {tmp_path / 'checkpoint'}: it was not written: ")
        assert why in note


@pytest.mark.parametrize("background", [True, False])
def test_what_follows_a_checkpoint_may_fail_and_it_stands(
    tmp_path: Path, background: bool, alone: Made
) -> None:
    pipe, optimizers = alone

    def failing() -> None:
        raise OSError("no room")

    writer = CheckpointWriter(pipe, background=background)
    with refuses(RunError, "checkpoint", "it was written, and the call after it failed: OSError: no room"):
        writer.save(tmp_path / "checkpoint", optimizers, then=failing)
        writer.wait()
    check_folder(tmp_path / "checkpoint")
