"""Nothing is left behind: no process, no segment of memory, no temporary folder, however a run ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from penstock.launch.start import launch
from penstock.train.checkpoints import newest_checkpoint
from support.faults import Row, tree
from support.strikes import Strike, environment

pytestmark = [pytest.mark.sweep, pytest.mark.timeout(300)]

PHASES = {
    "the start": "the look for a checkpoint",
    "the build": "the build",
    "a step": "a forward",
    "a checkpoint": "the rename of a commit",
    "the end": "the end",
}
PART = """
import os, signal, sys, time
from penstock.launch.stop import follow_parent
follow_parent()
number, rank = int(sys.argv[1]), os.environ["RANK"]
if number % 4 == 1 and rank == "1":
    os.kill(os.getpid(), signal.SIGKILL)
if number % 4 == 2:
    os._exit(3)
if number % 4 == 3 and rank == "0":
    os.kill(int(os.environ["PENSTOCK_LAUNCHER"]), signal.SIGTERM)
    time.sleep(60)
"""


def processes_of(folder: Path) -> list[int]:
    """The processes whose command line or environment names this folder, other than this one."""
    processes, name = list[int](), os.fsencode(folder)
    for process in Path("/proc").glob("[0-9]*"):
        try:
            texts = [(process / file).read_bytes() for file in ("cmdline", "environ")]
            zombie = (process / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            continue
        if any(name in text for text in texts) and not zombie and int(process.name) != os.getpid():
            processes.append(int(process.name))
    return processes


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("penstock-*"))


def until_gone(folder: Path, seconds: float) -> float:
    """Seconds until no process of this folder is left."""
    began = time.monotonic()
    while (left := processes_of(folder)) and time.monotonic() - began < seconds:
        time.sleep(0.05)
    for process in left:
        os.kill(process, signal.SIGKILL)
    assert not left, f"{len(left)} orphans"
    return time.monotonic() - began


@pytest.mark.parametrize(
    ("phase", "point"),
    [
        pytest.param(
            phase, point, id=phase, marks=pytest.mark.fault("the launcher is killed by SIGKILL", phase)
        )
        for phase, point in PHASES.items()
    ],
)
def test_a_killed_launcher_leaves_no_process(tmp_path: Path, row: Row, phase: str, point: str) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree(tmp_path)))
    strikes = environment([[Strike(0, point, 1, "launcher")]], tmp_path)
    variables = {**os.environ, **strikes, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-m", "penstock", "train", str(tmp_path / "config.yaml")]
    ended = subprocess.run(command, env=variables, capture_output=True, timeout=120, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    seconds = until_gone(tmp_path, 10)
    assert left_in(Path("/dev/shm")) == []
    if phase in ("a checkpoint", "the end"):  # complete or absent
        newest_checkpoint(tmp_path / "out")
    assert not list((tmp_path / "out" / "checkpoints").glob("step-*.tmp"))
    row.note(seconds=seconds)


@pytest.fixture
def rank(tmp_path: Path) -> str:
    file = tmp_path / "rank.py"
    file.write_text(PART)
    return str(file)


@pytest.mark.fault("40 quick starts and stops", "nothing is left")
def test_many_starts_and_stops_leave_nothing(
    tmp_path: Path, row: Row, rank: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """They end by themselves, by a kill, by an error, and by a signal to the launcher."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("OF_THIS_TEST", str(tmp_path))
    launch(2, [sys.executable, rank, "0"])  # torch opens files of its own for its first store
    began, before = time.monotonic(), (left_in(Path("/dev/shm")), len(os.listdir("/proc/self/fd")))
    codes = [launch(2, [sys.executable, rank, str(number)]) for number in range(40)]
    assert codes == [0, 128 + signal.SIGKILL, 3, 128 + signal.SIGTERM] * 10, capfd.readouterr().err
    assert left_in(tmp_path) == []
    assert processes_of(tmp_path) == []
    assert (left_in(Path("/dev/shm")), len(os.listdir("/proc/self/fd"))) == before
    row.note(seconds=time.monotonic() - began, cause="nothing to name")
