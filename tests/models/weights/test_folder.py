"""A folder is complete or absent, whatever fails while it is written."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import AlteredError, CheckpointError, InputError, RunError
from penstock.models.weights.folder import (
    MANIFEST,
    check_lengths,
    displaced,
    read_manifest,
    remove_folder,
    unfinished,
    write_folder,
)
from penstock.runtime.ranks import Ranks
from support.folders import check_folder
from support.ranks import GatheringRanks, on_threads
from support.refusals import refuses


def write_two(folder: Path) -> None:
    (folder / "weights.bin").write_bytes(b"w" * 100)
    (folder / "inner").mkdir(exist_ok=True)
    (folder / "inner" / "config.json").write_text("{}")


def test_a_written_folder_checks_and_leaves_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "checkpoint"
    write_folder(target, write_two, Ranks())
    check_folder(target)
    assert [entry.name for entry in target.parent.iterdir()] == ["checkpoint"]
    assert sorted(json.loads((target / MANIFEST).read_text())["files"]) == [
        "inner/config.json",
        "weights.bin",
    ]
    (target / ".nfs0001").write_text("a hidden file is nobody's business")
    check_folder(target)


def test_an_older_checkpoint_is_replaced_whole(tmp_path: Path) -> None:
    target = tmp_path / "checkpoint"
    write_folder(target, write_two, Ranks())
    write_folder(target, lambda folder: (folder / "new").touch(), Ranks())
    check_folder(target)
    assert sorted(entry.name for entry in target.iterdir()) == [MANIFEST, "new"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint"]


def test_other_people_s_files_are_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    with refuses(CheckpointError, rule="thesis.tex"):
        write_folder(tmp_path / "home", write_two, Ranks())
    (tmp_path / "file").write_text("precious")
    with refuses(CheckpointError, rule="has file,"):
        write_folder(tmp_path / "file", write_two, Ranks())
    assert (tmp_path / "home" / "thesis.tex").read_text() == "years of work"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "home"]


def test_a_place_that_cannot_be_written_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with refuses(CheckpointError, rule="cannot be written"):
        write_folder(tmp_path / "file" / "checkpoint", write_two, Ranks())


def test_processes_write_one_folder_together(tmp_path: Path) -> None:
    target = tmp_path / "checkpoint"

    def work(processes: Ranks) -> None:
        def write(folder: Path) -> None:
            (folder / f"part-{processes.index}").write_bytes(b"x")

        write_folder(target, write, processes)

    assert on_threads(3, work) == [None, None, None]
    check_folder(target)
    assert sorted(entry.name for entry in target.iterdir()) == [MANIFEST, "part-0", "part-1", "part-2"]


def test_a_failure_on_one_process_fails_all_and_keeps_the_old_folder(tmp_path: Path) -> None:
    target = tmp_path / "checkpoint"
    write_folder(target, write_two, Ranks())

    def work(processes: Ranks) -> None:
        def write(folder: Path) -> None:
            if processes.index == 1:
                raise OSError("disk full")
            (folder / "part").touch()

        write_folder(target, write, processes)

    first, second, third = on_threads(3, work)
    assert isinstance(second, OSError)
    for other in (first, third):
        assert isinstance(other, RunError)
        assert "process 1: it could not write its part of the folder: OSError: disk full" in str(other)
    check_folder(target)
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint"]


def test_a_process_that_loses_another_leaves_the_folder_to_the_first_one(tmp_path: Path) -> None:
    """0.5.0: where a process was killed as the first one published, the others removed the files that had
    just got their name; the first one then removed the older, whole folder."""
    calls: list[Any] = []

    class Second(GatheringRanks):
        index, count = 1, 2

        def gather(self, value: Any) -> list[Any]:
            calls.append(value)
            if len(calls) == 8:  # of `publish the folder`: the first one may be at it
                raise RunError("process 2", "it is gone", "See why")
            return [value, value]

    with refuses(RunError, rule="it is gone"):
        write_folder(tmp_path / "checkpoint", write_two, Second())
    (hidden,) = unfinished(tmp_path, "checkpoint")
    assert len(list(hidden.iterdir())) == 2


def test_an_older_folder_stays_until_the_new_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, rename = tmp_path / "checkpoint", Path.rename
    write_folder(target, write_two, Ranks())

    def losing(path: Path, to: Path) -> Path:
        if to == target:
            next(f for f in path.iterdir() if f.is_file() and f.name != MANIFEST).unlink()
        return rename(path, to)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", losing)
        write_folder(target, write_two, Ranks())
    (older,) = displaced(tmp_path, "checkpoint")
    check_folder(older)


def test_a_crash_while_writing_leaves_no_checkpoint(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        write_two(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_folder(tmp_path / "checkpoint", write, Ranks())
    assert list(tmp_path.iterdir()) == []


KILLED = """
import os, sys
from pathlib import Path
from penstock.models.weights.folder import write_folder
from penstock.runtime.ranks import Ranks

def write(folder):
    (folder / "new").touch()
    os.kill(os.getpid(), 9)

write_folder(Path(sys.argv[1]), write, Ranks())
"""


def test_a_kill_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    target = tmp_path / "checkpoint"
    write_folder(target, write_two, Ranks())
    child = subprocess.run(
        [sys.executable, "-c", KILLED, str(target)],
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert child.returncode == -9
    check_folder(target)
    (hidden,) = unfinished(tmp_path, "checkpoint")
    assert [entry.name for entry in hidden.iterdir()] == ["new"]


@pytest.mark.parametrize("moment", range(4))
def test_a_replacement_that_is_interrupted_leaves_the_old_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    """0.5.0: Ctrl-C between the two renames left nothing under the name. moment: before or after each"""
    target, moments, rename = tmp_path / "checkpoint", iter(range(4)), Path.rename
    write_folder(target, write_two, Ranks())

    def interrupted(path: Path, to: Path) -> Path:
        if next(moments, None) == moment:
            raise KeyboardInterrupt
        moved = rename(path, to)
        if next(moments, None) == moment:
            raise KeyboardInterrupt
        return moved

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_folder(target, lambda folder: (folder / "new").touch(), Ranks())
    check_folder(target)
    assert (target / "new").exists() == (moment == 3)
    others = [entry.name for entry in tmp_path.iterdir() if entry != target]
    assert [name.rpartition("-")[0] for name in others] == [".checkpoint.replaced"] * (moment == 3)


def damage(folder: Path, how: str) -> None:
    weights, manifest = folder / "weights.bin", folder / MANIFEST
    match how:
        case "no folder":
            shutil.rmtree(folder)
        case "missing":
            weights.unlink()
        case "truncated":
            weights.write_bytes(weights.read_bytes()[:-1])
        case "altered":
            weights.write_bytes(b"v" + weights.read_bytes()[1:])
        case "no manifest":
            manifest.unlink()
        case "damaged manifest":
            manifest.write_text(manifest.read_text()[:-20])
        case "manifest of another kind":
            manifest.write_text('{"files": ["weights.bin"]}')


@pytest.mark.parametrize(
    ("how", "kind", "rule"),
    [
        ("no folder", CheckpointError, "no such folder"),
        ("missing", CheckpointError, "this file and it is missing"),
        ("truncated", CheckpointError, "99 bytes and was written with 100"),
        ("altered", AlteredError, "contents differ"),
        ("no manifest", CheckpointError, "this folder has none"),
        ("damaged manifest", CheckpointError, "manifest itself is damaged"),
        ("manifest of another kind", CheckpointError, "manifest itself is damaged"),
    ],
)
def test_a_torn_folder_is_refused(tmp_path: Path, how: str, kind: type[InputError], rule: str) -> None:
    write_folder(tmp_path / "checkpoint", write_two, Ranks())
    damage(tmp_path / "checkpoint", how)
    with refuses(kind, str(tmp_path / "checkpoint"), rule) as caught:
        check_folder(tmp_path / "checkpoint")
    assert caught.value.exit_code == 2


@pytest.mark.fault("a checkpoint's files change", "each byte of the manifest, six ways")
def test_one_changed_byte_of_the_manifest_is_noticed(tmp_path: Path) -> None:
    """0.5.0: nothing hashed it, so that a changed entry blamed a file, and a changed key nothing at all."""
    write_folder(tmp_path / "checkpoint", write_two, Ranks())
    manifest = tmp_path / "checkpoint" / MANIFEST
    written = manifest.read_bytes()
    read_manifest(manifest.parent)
    for place in range(len(written)):
        for changed in (written[place] ^ 1, written[place] ^ 8, ord(" "), ord("\r"), ord("}"), ord("0")):
            if changed != written[place]:
                manifest.write_bytes(written[:place] + bytes([changed]) + written[place + 1 :])
                with refuses(CheckpointError, "manifest.json", "manifest itself is damaged"):
                    read_manifest(manifest.parent)


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ("{}", "it lists no file"),
        (
            '{"a": {"size": 1, "sha256": "SHA"}, "a": {"size": 1, "sha256": "SHA"}}',
            "a key occurs twice",
        ),
        ('{"../a": {"size": 1, "sha256": "SHA"}}', "'../a' is no file of the folder"),
        ('{"/etc/passwd": {"size": 1, "sha256": "SHA"}}', "'/etc/passwd' is no file of the folder"),
        ('{"inner/../../a": {"size": 1, "sha256": "SHA"}}', "is no file of the folder"),
        ('{"a": {"size": -1, "sha256": "SHA"}}', "'a' has size=-1"),
        ('{"a": {"size": true, "sha256": "SHA"}}', "'a' has size=True"),
        ('{"a": {"size": 1, "sha256": "abc"}}', "sha256='abc'"),
    ],
)
@pytest.mark.fault("a checkpoint's files change", "manifests that penstock never wrote")
def test_a_manifest_that_penstock_never_wrote_is_refused(tmp_path: Path, files: str, found: str) -> None:
    """0.5.0: it passed: a manifest was whatever had `files`, of no file, of one twice, of files elsewhere."""
    files = files.replace("SHA", "0" * 64)
    (tmp_path / MANIFEST).write_text(f'{{"files": {files}}}')  # without a digest, as 0.5.0 wrote it
    with refuses(CheckpointError, rule="manifest itself is damaged") as caught:
        read_manifest(tmp_path)
    assert found in str(caught.value)


def test_a_file_that_the_manifest_does_not_list_is_refused(tmp_path: Path) -> None:
    """0.5.0: it passed, unhashed, and was read where its name fits, as one more file of the optimizer's."""
    target = tmp_path / "checkpoint"
    write_folder(target, write_two, Ranks())
    extra = target / "optimizer-00002-of-00002.safetensors"
    extra.touch()
    for added in (False, True):
        with refuses(CheckpointError, "optimizer-00002", "manifest does"):
            check_lengths(target, added=added)
    extra.rename(target / "README.md")
    check_lengths(target, added=True)  # a model's folder, to which its owner adds
    with refuses(CheckpointError, "README.md", remedy="Move it out"):
        check_lengths(target)


def test_only_a_checkpoint_is_removed(tmp_path: Path) -> None:
    write_folder(tmp_path / "checkpoint", write_two, Ranks())
    (tmp_path / "checkpoint" / "thesis.tex").write_text("years of work")
    with refuses(CheckpointError, rule="thesis.tex"):
        remove_folder(tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / "thesis.tex").unlink()
    remove_folder(tmp_path / "checkpoint")
    assert list(tmp_path.iterdir()) == []
