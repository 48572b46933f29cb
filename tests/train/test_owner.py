"""One run at a time writes an output folder: a live one keeps it, and one that is gone is replaced."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError, FolderInUseError, RunError
from penstock.runtime.health import notes
from penstock.runtime.ranks import Ranks
from penstock.train import owner
from penstock.train.owner import OWNER, Owner, check_shared, last_run, owned
from penstock.train.preflight import preflight
from penstock.train.run import run
from support.ranks import on_threads
from support.refusals import refuses
from support.tiny import config, metrics


def facts(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / OWNER).read_text())
    return found


# _here: this process, as a file of another owner names it
def write(folder: Path, **changed: Any) -> None:
    """An owner's file, of this process but for what has `changed`."""
    mine = {"run": "other", **owner._here(), "token": "x", "ended": False}
    (folder / OWNER).write_text(json.dumps(mine | changed))


def taken(folder: Path, **options: Any) -> list[str]:
    """What is said where the folder is taken."""
    said: list[str] = []
    with owned(folder, "mine", said.append, **options) as mine:
        mine.settle()
        assert facts(folder)["run"] == "mine"
    return said


def refusal(folder: Path, **options: Any) -> str:
    before = (folder / OWNER).read_bytes()
    with pytest.raises(FolderInUseError) as caught:
        taken(folder, **options)
    assert (folder / OWNER).read_bytes() == before
    assert caught.value.exit_code == 2
    assert caught.value.remedy
    return str(caught.value)


def test_a_run_that_ended_leaves_its_name_and_is_followed_without_a_word(tmp_path: Path) -> None:
    assert last_run(tmp_path) is None
    for _ in range(2):
        assert taken(tmp_path) == []
        assert last_run(tmp_path) == "mine"
    assert facts(tmp_path)["ended"]
    assert [entry.name for entry in tmp_path.iterdir()] == [OWNER]


CHILD = """
import sys, time
from pathlib import Path
from penstock.train.owner import owned

with owned(Path(sys.argv[1]), "first", print):
    print("owned", flush=True)
    time.sleep(600)
"""


@pytest.mark.fault("two jobs and one output folder", "one lives, then it is killed")
def test_a_killed_run_is_replaced_and_a_live_one_is_not(tmp_path: Path) -> None:
    """0.5.0: two jobs wrote one folder, mixed their rows of metrics and removed each other's checkpoints."""
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "owned\n"
        who = f"run first, process {child.pid} on {socket.gethostname()}"
        assert f"{who} writes there: that process lives. End that process" in refusal(tmp_path)
        os.kill(child.pid, signal.SIGKILL)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # its parent has not asked for its end yet
        assert taken(tmp_path) == [f"{tmp_path}: taken over from {who}, which did not end and is gone"]


@pytest.mark.fault("two jobs and one output folder", "another process has the number of the owner")
def test_another_process_of_the_same_number_is_not_taken_for_alive(tmp_path: Path) -> None:
    write(tmp_path)
    assert "that process lives" in refusal(tmp_path)
    write(tmp_path, began=1)
    assert "is gone" in taken(tmp_path)[0]


# _here: another process, as a file of an owner names it
def test_a_launcher_keeps_the_folder_between_two_attempts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unreleased: while it waited to start the run again, another run could take the folder.

    Its own next attempt need not wait whether another comes.
    """
    launcher = {**owner._here(), "pid": os.getpid()}
    del launcher["host"]
    for ended in (False, True):
        write(tmp_path, launcher=launcher, began=1, ended=ended)  # the rank is gone
        assert "its launcher lives" in refusal(tmp_path)
        with monkeypatch.context() as patch:
            patch.setenv("PENSTOCK_LAUNCHER", str(os.getpid()))
            patch.setattr(owner, "_SETTLED", 60.0)
            assert taken(tmp_path) == []
    write(tmp_path, launcher={**launcher, "began": 1}, began=1)
    assert "is gone" in taken(tmp_path)[0]
    write(tmp_path, launcher=launcher)  # the rank lives on
    monkeypatch.setenv("PENSTOCK_LAUNCHER", str(os.getpid()))
    assert "lives" in refusal(tmp_path)


@pytest.mark.parametrize("how", ["elsewhere", "unknown", "torn"])
@pytest.mark.fault("two jobs and one output folder", "the owner is on another machine, with another clock")
def test_an_owner_on_another_machine_is_looked_at_until_its_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Whatever the clocks say."""
    with owned(tmp_path, "first", print, beat=0.02), monkeypatch.context() as patch:
        patch.setattr(notes, "machine", lambda: "" if how == "unknown" else "another boot")
        assert "its heartbeat moves" in refusal(tmp_path, beat=0.02, patience=30.0)
    if how == "torn":
        (tmp_path / OWNER).write_bytes(b"")
    else:
        write(tmp_path, machine="another boot" if how == "elsewhere" else "")
    ahead = 4_000_000_000
    os.utime(tmp_path / OWNER, (ahead, ahead))
    assert "is gone" in taken(tmp_path, beat=0.02, patience=0.1)[0]


def test_a_file_that_is_removed_while_it_is_looked_at_is_no_heartbeat(tmp_path: Path) -> None:
    """Unreleased: it said "its heartbeat moves", and refused the folder of an owner that was gone."""
    write(tmp_path, machine="another boot")
    removal = threading.Timer(0.1, (tmp_path / OWNER).unlink)
    removal.start()
    assert "is gone" in taken(tmp_path, beat=0.02, patience=0.3)[0]
    removal.join()


@pytest.mark.fault("two jobs and one output folder", "several come at once")
def test_of_several_that_come_at_once_one_owns_the_folder(tmp_path: Path) -> None:
    for ended in (None, True, False):
        if ended is not None:
            write(tmp_path, ended=ended, began=1)
        together, done = threading.Barrier(4), threading.Barrier(4)
        found: list[str] = []

        def come(number: int, together: threading.Barrier, done: threading.Barrier, found: list[str]) -> None:
            together.wait(10)
            try:
                with owned(tmp_path, str(number), lambda _: None) as mine:
                    mine.settle()
                    found.append("owned")
                    done.wait(10)
            except FolderInUseError:
                found.append("refused")
                done.wait(10)

        threads = [threading.Thread(target=come, args=(n, together, done, found)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(found) == ["owned", "refused", "refused", "refused"]


# _thread: that it has ended is seen in no other way
@pytest.mark.fault("two jobs and one output folder", "the owner stands still, and another takes over")
def test_a_run_that_stood_still_ends_where_another_has_taken_over(tmp_path: Path) -> None:
    """It was stopped for longer than its heartbeat was waited for; on its return it writes nothing more."""
    with owned(tmp_path, "first", print, beat=0.02) as mine:
        mine.check()
        write(tmp_path, run="second", pid=7, host="elsewhere")
        while mine._thread.is_alive():
            mine._thread.join(0.01)
        with refuses(RunError, rule="run second, process 7 on elsewhere, has taken it over"):
            mine.check()
    assert facts(tmp_path)["run"] == "second"
    assert not facts(tmp_path)["ended"]


# _touch: one beat of the thread, now
def test_a_file_that_somebody_removed_is_made_again(tmp_path: Path) -> None:
    with owned(tmp_path, "mine", print, beat=0.02) as mine:
        (tmp_path / OWNER).unlink()
        mine._touch()
        mine.check()
        assert facts(tmp_path)["run"] == "mine"


def test_a_folder_that_takes_no_file_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / OWNER).mkdir()
    assert last_run(tmp_path) is None
    with refuses(ConfigError, rule="owner.json cannot be written there (it is a folder"):
        taken(tmp_path)


def test_a_second_run_is_refused_before_it_writes_anything(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with owned(tmp_path / "out", "first", print):
        with refuses(FolderInUseError, rule="run first, process"):
            run(preflight(config(tmp_path)))
        assert [entry.name for entry in (tmp_path / "out").iterdir()] == [OWNER]


def test_a_run_asks_before_each_step_whether_the_folder_is_still_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = iter(range(2))

    def check(self: Owner) -> None:
        if next(asked, None) is None:
            raise RunError("folder", "it is taken", "Go")

    monkeypatch.setattr(Owner, "check", check)
    with refuses(RunError, "folder", "it is taken"):
        run(preflight(config(tmp_path)))
    assert [row["step"] for row in metrics(tmp_path) if "loss" in row] == [1, 2]
    assert facts(tmp_path / "out")["ended"]


def test_ranks_that_write_into_several_folders_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.5.0: ranks of several working folders or machines trained to the first checkpoint, which then failed:
    nothing looked at the folder before.
    """

    def work(folders: list[Path], processes: Ranks) -> None:
        check_shared(folders[processes.index], processes)

    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    assert on_threads(3, partial(work, [here, here, here])) == [None] * 3
    for error in on_threads(3, partial(work, [here, here, there])):
        assert isinstance(error, ConfigError)
        assert f"process 2 does not see in {there} what process 0 writes into {here}" in str(error)
    assert [*here.iterdir(), *there.iterdir()] == []
    seen: list[Path] = []
    monkeypatch.setattr("penstock.train.run.check_shared", lambda output, processes: seen.append(output))
    run(preflight(config(tmp_path, steps=1)))
    assert len(seen) == 1


# _create: the file goes just before it is made
def test_a_file_that_somebody_removes_meanwhile_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.5.0: gone between two reads it was taken for a torn one: the run waited 20 s, and was refused."""
    create, attempts = owner._create, list[int]()

    def created(file: Path, facts: dict[str, Any]) -> bool:
        attempts.append(1)
        return len(attempts) > 1 and create(file, facts)  # at first another is faster, and removes its file

    monkeypatch.setattr(owner, "_create", created)
    assert taken(tmp_path, patience=0.1) == []
    assert len(attempts) == 2
