"""The folder of an attempt is gone in the end, also where its launcher was killed."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from penstock.launch.folder import attempt_folder, remove_left

OLD = 1_000_000.0  # seconds since 1970


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def left(folder: Path, name: str) -> Path:
    """A folder as one that a killed launcher leaves."""
    made = folder / name
    (made / "0").mkdir(parents=True)
    os.utime(made, (OLD, OLD))
    return made


def test_the_folder_is_removed_at_the_end(temporary: Path) -> None:
    with attempt_folder() as folder:
        (folder / "0").mkdir()
        assert folder.parent == temporary
    assert list(temporary.iterdir()) == []


def test_what_a_killed_launcher_left_is_removed_and_nothing_else(temporary: Path) -> None:
    """0.5.0: 11 folders were left in the temporary folder."""
    dead = left(temporary, "penstock-attempt-dead")
    others = {left(temporary, "penstock-measure-x"), temporary / "penstock-attempt-link", temporary / "file"}
    (temporary / "penstock-attempt-link").symlink_to(temporary / "penstock-measure-x")
    (temporary / "file").touch()
    (temporary / "penstock-attempt-young").mkdir()
    with attempt_folder() as living:
        assert not dead.exists()
        os.utime(living, (OLD, OLD))
        remove_left()
        assert {*temporary.iterdir()} == {*others, living, temporary / "penstock-attempt-young"}


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_another_user_stays(temporary: Path) -> None:
    theirs = left(temporary, "penstock-attempt-theirs")
    os.chown(theirs, 12345, 12345)
    remove_left()
    assert theirs.exists()
