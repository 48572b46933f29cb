"""What surrounds a command: its language, its home, its streams, Python's switches, small mounts."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import yaml

from support.faults import STEPS, Row, assert_as_if_nothing_had_happened, named_cause, tree
from support.tiny import checkpoint

pytestmark = [pytest.mark.sweep, pytest.mark.timeout(240)]


Sections = Mapping[str, Mapping[str, Any]]


def run(
    folder: Path, shell: str = 'exec "$@"', *python: str, sections: Sections = MappingProxyType({})
) -> subprocess.CompletedProcess[str]:
    """`penstock train` of a tiny run, started by a line of the shell."""
    (folder / "config.yaml").write_text(yaml.safe_dump(tree(folder, **sections)))  # type: ignore[arg-type]
    command = [sys.executable, *python, "-P", "-m", "penstock", "train", str(folder / "config.yaml")]
    return subprocess.run(
        ["sh", "-c", shell, "sh", *command], env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    ended = run(folder)
    assert ended.returncode == 0, ended.stderr
    return folder


def as_usual(ended: subprocess.CompletedProcess[str], folder: Path, undisturbed: Path) -> None:
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert_as_if_nothing_had_happened(folder, undisturbed)


SHELLS = {
    "LANG=C": 'LANG=C LC_ALL=C LANGUAGE= PYTHONUTF8=0 exec "$@"',
    "no HOME": 'unset HOME XDG_CACHE_HOME HF_HOME; exec "$@"',
    "closed stdin": 'exec "$@" <&-',
    "closed stdout": 'exec "$@" >&-',
    "closed stderr": 'exec "$@" 2>&-',
    "all three closed": 'exec "$@" <&- >&- 2>&-',
    "python -O": 'PYTHONOPTIMIZE=1 exec "$@"',
    "python -W error": 'exec "$@"',
}


@pytest.mark.parametrize(
    ("name", "shell"),
    [
        pytest.param(n, s, id=n, marks=pytest.mark.fault("a command's surroundings", n))
        for n, s in SHELLS.items()
    ],
)
def test_a_run_does_not_depend_on_its_surroundings(
    tmp_path: Path, undisturbed: Path, row: Row, name: str, shell: str
) -> None:
    python = ("-W", "error") if name == "python -W error" else ()
    as_usual(run(tmp_path, shell, *python), tmp_path, undisturbed)
    row.note(cause="nothing to name")


@pytest.mark.fault("a disk is full", "that of standard output (/dev/full)")
def test_a_run_whose_output_cannot_be_written_says_so(tmp_path: Path, row: Row) -> None:
    ended = run(tmp_path, 'exec "$@" >/dev/full')
    assert ended.returncode == 1
    said = [line for line in ended.stderr.splitlines() if line.startswith("penstock: error: ")]
    assert len(said) == 1
    assert "standard output: it cannot be written (OSError: [Errno 28] No space left on device)" in said[0]
    row.note(cause=named_cause(said[0].removeprefix("penstock: error: ")))


# ---- Small mounts, in a namespace of their own


def mounted(size: str, where: str) -> str:
    return f'mount -t tmpfs -o size={size} tmpfs {where} && exec "$@"'


@pytest.fixture
def namespaces() -> None:
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no namespace of mounts can be made here")


def run_mounted(
    folder: Path, size: str, where: Path, sections: Sections = MappingProxyType({})
) -> tuple[subprocess.CompletedProcess[str], float]:
    began = time.monotonic()
    shell = f"exec unshare -m sh -c '{mounted(size, str(where))}' sh \"$@\""
    return run(folder, shell, sections=sections), time.monotonic() - began


@pytest.mark.usefixtures("namespaces")
@pytest.mark.fault("a small /dev/shm", "64 KiB, without checkpoints in memory")
def test_messages_need_no_room_in_shm(tmp_path: Path, undisturbed: Path, row: Row) -> None:
    ended, _ = run_mounted(tmp_path, "64k", Path("/dev/shm"))
    as_usual(ended, tmp_path, undisturbed)
    row.note(cause="nothing to name")


@pytest.mark.usefixtures("namespaces")
@pytest.mark.fault("a small /dev/shm", "64 KiB, with checkpoints in memory")
def test_checkpoints_in_memory_say_how_much_room_they_need(tmp_path: Path, row: Row) -> None:
    ended, seconds = run_mounted(tmp_path, "64k", Path("/dev/shm"), {"train": {"memory_checkpoint_every": 1}})
    assert ended.returncode == 2, ended.stderr
    said = [line for line in ended.stderr.splitlines() if line.startswith("penstock: error: ")]
    assert len(said) == 1
    assert "train.memory_checkpoint_every" in said[0]
    assert "in /dev/shm, which has 0 MiB left" in said[0]
    row.note(seconds=seconds, cause=named_cause(said[0].removeprefix("penstock: error: ")))


@pytest.mark.usefixtures("namespaces")
@pytest.mark.fault("a disk is full", "at the first checkpoint, on a file system of 96 KiB")
def test_a_full_disk_at_the_first_checkpoint_promises_no_other(tmp_path: Path, row: Row) -> None:
    """0.5.0: it said that the checkpoint before is complete, and there was none."""
    (tmp_path / "out").mkdir()
    ended, seconds = run_mounted(tmp_path, "96k", tmp_path / "out")
    assert ended.returncode == 1, ended.stderr
    said = next(line for line in ended.stderr.splitlines() if line.startswith("penstock: error: "))
    assert "No space left on device" in said
    assert "if there is one" in said
    assert not checkpoint(tmp_path, STEPS).exists()
    row.note(seconds=seconds, cause=named_cause(said.removeprefix("penstock: error: ")))


@pytest.mark.fault("a process runs out", "of memory: ulimit -v, as the command starts")
def test_a_command_with_too_few_addresses_says_so(tmp_path: Path, row: Row) -> None:
    ended = run(tmp_path, 'ulimit -v 900000; exec "$@"')
    assert ended.returncode == 1
    assert "penstock: error: " in ended.stderr
    assert "ulimit -v 900000" in ended.stderr.splitlines()[-1], ended.stderr
    row.note(cause=named_cause(ended.stderr.splitlines()[-1].removeprefix("penstock: error: ")))
