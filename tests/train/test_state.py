"""The state of a run in a checkpoint: what cannot be read is a typed error."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.errors import CheckpointError
from penstock.models.weights.folder import Hashed, made_entry, sha256_of, write_folder
from penstock.runtime.ranks import Ranks
from penstock.train.state import read_state
from support.refusals import refuses


@pytest.mark.parametrize("kind", ["deep", "a pipe", "a list"])
def test_a_state_that_cannot_be_read_is_a_checkpoint_error(tmp_path: Path, kind: str) -> None:
    """0.5.0: deep JSON was a RecursionError, and a pipe was waited for: it was read as our own."""
    path, text = tmp_path / "checkpoint", "[" * 100_000 if kind == "deep" else "[1]"

    def write(folder: Path) -> Hashed:
        (folder / "state.json").write_text(text)
        return {"state.json": made_entry(len(text), sha256_of(folder / "state.json"))}

    write_folder(path, write, Ranks())
    if kind == "a pipe":
        (path / "state.json").unlink()
        os.mkfifo(path / "state.json")
    with refuses(CheckpointError, "state.json", "cannot be read"):
        read_state(path)
