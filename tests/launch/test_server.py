"""Ranks are forked from a process that has imported what they need, where that is safe."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from penstock.launch import server as server_of_ranks
from penstock.launch import start as start_of_ranks
from penstock.launch.server import Rehearsal
from penstock.launch.start import Launcher, Server, launch
from support.pool import start

RANK = """
import gc, os, sys
place = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
words = *place, "shared_by_ranks" in sys.modules and gc.isenabled(), sys.argv[1:]
os.write(1, f"{words}\\n".encode())
if "kill" in sys.argv:
    os.kill(os.getppid(), 9)
"""
STARTS_A_THREAD = (
    "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
)


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Says which rank it is, and whether it has what the server has imported, and collects garbage."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    (tmp_path / "said_by_ranks.py").write_text(RANK)
    (tmp_path / "shared_by_ranks.py").write_text("")
    return [sys.executable, "-P", "-m", "said_by_ranks", "--word"]


def test_ranks_of_each_attempt_have_what_was_imported_once(
    command: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    with Server(["no_such_module", "shared_by_ranks"]) as server, Launcher(server) as launcher:
        assert [launcher.attempt(2, command, number).code for number in range(2)] == [0, 0]
    said = sorted(capfd.readouterr().out.splitlines())
    assert said == [
        f"('{rank}', '{attempt}', True, ['--word'])" for rank, attempt in ("00", "01", "10", "11")
    ]


def test_where_an_import_has_begun_a_thread_each_rank_begins_anew(
    command: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A lock that a thread held would stay locked in a fork for ever."""
    (tmp_path / "shared_by_ranks.py").write_text(STARTS_A_THREAD)
    with Server(["shared_by_ranks"]) as server, Launcher(server) as launcher:
        assert launcher.attempt(1, command).code == 0
    assert capfd.readouterr().out == "('0', '0', False, ['--word'])\n"


FORKS = """
import sys, threading
import shared_by_ranks
from penstock.launch.start import Launcher, Server, take_defaults
take_defaults()
print("before")
if sys.argv[1] == "a thread":
    threading.Thread(target=threading.Event().wait, daemon=True).start()
command = [sys.executable, "-P", "-m", "said_by_ranks", *sys.argv[1:]]
try:
    with Server(["shared_by_ranks"], forks=True) as server, Launcher(server) as launcher:
        for number in range(ATTEMPTS):
            server.open()
            lines = [open(f"/proc/{pid}/cmdline").read() for pid in ("self", server.pid)]
            code = launcher.attempt(RANKS, command, number).code
            print(number, "of a fork:" if lines[0] == lines[1] else "of one begun by exec:", code)
finally:
    print("after")
"""


def forking(folder: Path, *arguments: str, attempts: int = 2, ranks: int = 2) -> tuple[list[str], str]:
    """Run a launcher, in the folder of the ranks' modules, whose server is a fork of it if it may be.

    Returns the lines that it and its ranks have written, sorted; and stderr.
    """
    text = FORKS.replace("ATTEMPTS", str(attempts)).replace("RANKS", str(ranks))
    (folder / "launcher.py").write_text(text)
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    ended = subprocess.run(
        [sys.executable, "launcher.py", *arguments],
        cwd=folder, env=buffered, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    return sorted(ended.stdout.splitlines()), ended.stderr


def said(*arguments: str) -> list[str]:
    return [f"('{rank}', '{attempt}', True, {[*arguments]})" for rank, attempt in ("00", "01", "10", "11")]


def test_a_server_that_is_a_fork_has_what_its_launcher_has_imported(
    command: list[str], tmp_path: Path
) -> None:
    """What the launcher has still to write, or does later, comes once.

    A server that was killed is followed by one that begins by exec: the launcher may have begun threads.
    """
    (tmp_path / "said_by_ranks.py").write_text(RANK.replace('"kill" in sys.argv', 'place[1] == "2"'))
    lines, err = forking(tmp_path, "--word", attempts=4)
    assert [line for line in lines if "'2'," not in line and "'3'," not in line] == [
        *said("--word"),
        "0 of a fork: 0",
        "1 of a fork: 0",
        f"2 of a fork: {128 + signal.SIGKILL}",
        "3 of one begun by exec: 0",
        "after",
        "before",
    ]
    assert [line for line in lines if "'3'," in line] == [
        f"('{rank}', '3', True, ['--word'])" for rank in "01"
    ]
    (error,) = err.splitlines()
    assert "which started the ranks, was killed" in error


def test_a_launcher_with_a_thread_has_a_server_that_begins_by_exec(
    command: list[str], tmp_path: Path
) -> None:
    """A lock that the thread held would stay locked in a fork for ever."""
    lines, err = forking(tmp_path, "a thread")
    by_exec = [f"{number} of one begun by exec: 0" for number in range(2)]
    assert lines == [*said("a thread"), *by_exec, "after", "before"]
    assert err == ""


ENDS = {
    "sys.exit(3)": (3, ""),
    "sys.exit('no such file')": (1, "no such file"),
    "raise LookupError('no such key')": (1, "LookupError: no such key"),
    "import launcher": (1, "ModuleNotFoundError: No module named 'launcher'"),
    "pass": (0, ""),
}  # of the rank of each attempt: its last line, exit code, and the last line of its stderr


def test_a_rank_of_such_a_server_ends_as_any_program(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And finds no modules in the folder where it works, as by -P; here one that is not PYTHONPATH's."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    text = "import os, sys\nattempt = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
    text += "".join(f"if attempt == '{number}':\n    {ends}\n" for number, ends in enumerate(ENDS))
    (tmp_path / "said_by_ranks.py").write_text(text)
    lines, err = forking(here, "--word", attempts=len(ENDS), ranks=1)
    codes = [code for code, _ in ENDS.values()]
    assert lines == [*(f"{number} of a fork: {code}" for number, code in enumerate(codes)), "after", "before"]
    ours = [line for line in err.splitlines() if not line.startswith(("  ", "Traceback ", "penstock: "))]
    assert ours == [said for _, said in ENDS.values() if said]


REHEARSES = """
def rehearse(words):
    open("rehearsed", "a").write(f"{words} ")
"""


def test_a_call_is_made_once_ahead_of_all_ranks(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """And once more in a new server. An error in it is left to the ranks."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shared_by_ranks.py").write_text(REHEARSES)
    with Server() as server, Launcher(server) as launcher:
        server.rehearse(Rehearsal("shared_by_ranks", "no_such_function", None))
        server.rehearse(Rehearsal("shared_by_ranks", "rehearse", {"steps": 3}))
        assert launcher.attempt(2, command).code == 0
        assert (tmp_path / "rehearsed").read_text() == "{'steps': 3} "
        launcher.attempt(2, [*command, "kill"])
        assert launcher.attempt(1, command).code == 0
    assert (tmp_path / "rehearsed").read_text() == "{'steps': 3} " * 2
    said = capfd.readouterr().out
    assert "('1', '0', True, ['--word'])" in said
    assert said.endswith("('0', '0', True, ['--word'])\n")


# _rehearse, _DRIVERS: in this process, which has no GPU
def test_no_call_is_made_ahead_where_there_is_a_gpu(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could open the driver, after which no fork is safe."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "shared_by_ranks.py").write_text(REHEARSES)
    monkeypatch.setattr(server_of_ranks, "_DRIVERS", ("/dev/null",))
    server_of_ranks._rehearse(Rehearsal("shared_by_ranks", "rehearse", 1))
    assert not (tmp_path / "rehearsed").exists()


@pytest.mark.fault("a run starts again by itself", "the server of spare ranks is killed")
def test_a_server_that_was_killed_is_named_and_the_next_attempt_has_another(
    command: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    with Server(["shared_by_ranks"]) as server, Launcher(server) as launcher:
        pid = server.pid
        ended = launcher.attempt(2, [*command, "kill"])
        assert ended.code == 128 + signal.SIGKILL
        assert ended.cause == f"process {pid}, which started the ranks, was killed, and they with it"
        assert launcher.attempt(1, command).code == 0
    assert capfd.readouterr().out.endswith("('0', '0', True, ['--word'])\n")


# the seconds that a server may be silent: of one that is stopped, each wait is for the whole time
def patience(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_of_ranks, "_SILENCE", seconds)


STOPS_ITS_SERVER = """
import os, signal, sys, time
if os.environ["RANK"] == "0":
    time.sleep(0.5)  # until the launcher has read the pids
    os.kill(os.getppid(), signal.SIGSTOP)
    open("stopped", "w").close()
while not os.path.exists("stopped"):
    time.sleep(0.01)
if sys.argv[1] == "ends":
    sys.exit(1)
time.sleep(600)
"""


def launch_in(folder: str) -> None:
    patience(0.5, pytest.MonkeyPatch())
    os.chdir(folder)
    os.environ["PYTHONPATH"] = folder  # the pool's processes have the variables of its start
    os.dup2(os.open("stderr", os.O_CREAT | os.O_WRONLY), 2)
    sys.exit(launch(2, [sys.executable, "-P", "-m", "said_by_ranks", "stays"]))


def test_a_stopped_server_does_not_hide_that_ranks_end(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Unreleased: the launcher waited for ever, as the server alone told it how ranks end."""
    monkeypatch.chdir(tmp_path)
    patience(0.5, monkeypatch)
    (tmp_path / "said_by_ranks.py").write_text(STOPS_ITS_SERVER)
    with Server() as server, Launcher(server) as launcher:
        ended = launcher.attempt(2, [*command[:-1], "ends"])
        assert ended.code == 128 + signal.SIGKILL
        assert "did not say how they ended" in ended.cause
    assert "did not say how they ended" in capfd.readouterr().err


@pytest.mark.parametrize("seconds", [0.5, None])
def test_a_server_that_is_stopped_before_it_has_told_its_ranks(
    command: list[str], seconds: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a moment: nothing happens. For longer: the launcher waited for ever for their process ids."""
    if seconds is None:
        patience(0.5, monkeypatch)
    with Server() as server, Launcher(server) as launcher:
        os.kill(server.pid, signal.SIGSTOP)
        if seconds is not None:
            threading.Timer(seconds, os.kill, (server.pid, signal.SIGCONT)).start()
        ended = launcher.attempt(2, command)
    assert ended.code == (128 + signal.SIGKILL if seconds is None else 0)
    assert ("did not say how they ended" in ended.cause) == (seconds is None)


@pytest.mark.parametrize("signals", [1, 2])
@pytest.mark.fault("the whole job is ended", "SIGTERM, with a stopped server of ranks")
def test_a_launcher_with_a_stopped_server_hears_signals(
    command: list[str], tmp_path: Path, signals: int
) -> None:
    """Unreleased: it was deaf to SIGTERM, once and twice."""
    (tmp_path / "said_by_ranks.py").write_text(STOPS_ITS_SERVER)
    parent = start(launch_in, str(tmp_path))
    end = time.monotonic() + 60
    while not (tmp_path / "stopped").exists() and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(0.5)  # until the launcher has read the pids
    for _ in range(signals):
        assert parent.pid is not None
        os.kill(parent.pid, signal.SIGTERM)
        time.sleep(0.2)
    parent.join(120)
    assert parent.exitcode == 128 + signal.SIGTERM
    assert "penstock: error: process" in (tmp_path / "stderr").read_text()
