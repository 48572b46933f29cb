"""Ranks under torchrun's launcher: one cause, first and once, and nobody left behind."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from penstock.errors import ConfigError, PeerLostError
from penstock.launch import failures
from penstock.launch.failures import describe, exit_code
from penstock.launch.start import launch, relaunch
from penstock.launch.stop import under_torchrun
from support.pool import alive, start

HOST = socket.gethostname()
PRELUDE = """
import os, sys, time, signal
from penstock.errors import ConfigError, PeerLostError, StalledPeerError
from penstock.launch import stop
from penstock.launch.stop import fail, follow_parent
follow_parent()
rank = int(os.environ["RANK"])
"""
# _LAST_SECONDS: after which SIGTERM ends a rank; for tests in which none reports in that time
SOON = "stop._LAST_SECONDS = 0.5\n"


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks that do not end by themselves after a failure are killed soon."""
    monkeypatch.setattr(failures, "GRACE_SECONDS", 2)


def script(tmp_path: Path, text: str) -> list[str]:
    file = tmp_path / "rank.py"
    file.write_text(PRELUDE + text)
    return [sys.executable, str(file)]


def launched(ranks: int, tmp_path: Path, text: str, capfd: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The exit code and stderr of `ranks` ranks that run `text`."""
    code = launch(ranks, script(tmp_path, text))
    return code, capfd.readouterr().err


def wait_until_gone(pids: list[int], seconds: float) -> list[int]:
    end = time.monotonic() + seconds
    while time.monotonic() < end and any(alive(pid) for pid in pids):
        time.sleep(0.05)
    return [pid for pid in pids if alive(pid)]


def test_all_ranks_run_and_what_they_print_passes_through(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM ends a rank's child itself, which has none of the rank's handlers, and the rank goes on."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    before = signal.getsignal(signal.SIGTERM)
    text = """
set_here = os.environ['OMP_NUM_THREADS'], os.environ['CUDA_DEVICE_MAX_CONNECTIONS']
os.write(1, f"{rank} of {os.environ['WORLD_SIZE']} {' '.join(set_here)}\\n".encode())
if rank == 0:
    ready, started = os.pipe()
    child = os.fork()
    if not child:
        os.write(started, b"1")
        time.sleep(600)
    os.read(ready, 1)
    os.kill(child, signal.SIGTERM)
    _, status = os.wait()
    time.sleep(1)  # SIGTERM of its own would have ended the rank by now
    os._exit(0 if os.waitstatus_to_exitcode(status) == -signal.SIGTERM else 9)
"""
    assert launch(3, script(tmp_path, SOON + text)) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == [f"{rank} of 3 1 32" for rank in range(3)]
    assert signal.getsignal(signal.SIGTERM) is before
    assert "OMP_NUM_THREADS" not in os.environ
    assert not under_torchrun()


@pytest.mark.usefixtures("soon")
def test_the_first_cause_is_shown_once_and_all_ranks_end(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = """
if rank == 2:
    fail(ConfigError("a=1", "it is wrong", "Give 2"))
cause = os.environ["TORCHELASTIC_ERROR_FILE"].replace(f"/{rank}/", "/2/")
while not os.path.exists(cause):
    time.sleep(0.01)
if rank == 1:  # the launcher may well notice this one first
    fail(PeerLostError("rank 2", "it is gone", "Look at its output"))
time.sleep(600)
"""
    assert launched(3, tmp_path, text, capfd) == (2, "penstock: error: rank 2: a=1: it is wrong. Give 2\n")


@pytest.mark.usefixtures("soon")
def test_a_rank_that_is_stopped_is_ended_too_and_not_blamed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = """
if rank == 0:
    time.sleep(0.3)
    fail(StalledPeerError("rank 0 waiting", "rank 1 has been silent for 1 s", "See what it was doing"))
os.kill(os.getpid(), signal.SIGSTOP)
"""
    assert launch(2, script(tmp_path, text)) == 1
    assert capfd.readouterr().err.startswith("penstock: error: rank 0 waiting: rank 1 has been silent")


def test_a_rank_has_time_to_report_before_it_is_ended(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.2.0: the launcher ended ranks by SIGTERM before they had noticed that another one was gone."""
    monkeypatch.chdir(tmp_path)
    text = """
from penstock.errors import FailurePoint, give_account
if rank == 1:
    while not os.path.exists("rank-0-runs"):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
open("rank-0-runs", "w").close()
time.sleep(1.5)
error = PeerLostError("rank 0 waiting for 1B0 from rank 1", "rank 1 is gone", "Look at it")
error.reports = {1: "last reported 0.8 s ago: in 1F0, warm-up"}
give_account(error, FailurePoint("waiting for 1B0 from rank 1, steady phase", "2 of 4 ops done"))
fail(error)
"""
    assert launch(2, script(tmp_path, text)) == 128 + signal.SIGKILL
    assert capfd.readouterr().err.splitlines() == [
        f"penstock: error: rank 1 on {HOST} was killed by signal 9 (SIGKILL), "
        "last reported 0.8 s ago: in 1F0, warm-up",
        "What the ranks did last:",
        "  rank 0 waiting for 1B0 from rank 1, steady phase; 2 of 4 ops done",
        "  rank 1 last reported 0.8 s ago: in 1F0, warm-up",
    ]


@pytest.mark.usefixtures("soon")
def test_a_rank_that_hangs_in_foreign_code_is_ended(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Python runs no handler there; what fails meanwhile is no cause."""
    text = """
if rank == 1:
    os._exit(7)
if rank == 2:
    while not os.path.exists(os.environ["TORCHELASTIC_ERROR_FILE"].replace("error.json", "ending")):
        time.sleep(0.01)
    fail(OSError("a child was ended"))
import ctypes
ctypes.CDLL(None).sleep(600)  # in C: and again, as a signal cuts it short
ctypes.CDLL(None).sleep(600)
"""
    said = f"penstock: error: rank 1 on {HOST} ended with exit code 7\n"
    assert launched(3, tmp_path, text, capfd) == (7, said)


def test_a_rank_that_got_sigterm_from_elsewhere_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """0.5.0: "the other ranks died or closed their connections"."""
    text = """
if rank == 1:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(600)
while not os.path.exists(os.environ["TORCHELASTIC_ERROR_FILE"].replace("/0/error.json", "/1/ending")):
    time.sleep(0.01)
fail(PeerLostError("rank 0 waiting for the end of the step", "rank 1 died", "Look"))
"""
    said = f"penstock: error: rank 1 on {HOST} was ended by SIGTERM\n"
    assert launched(2, tmp_path, SOON + text, capfd) == (128 + signal.SIGTERM, said)


@pytest.mark.usefixtures("soon")
def test_a_rank_that_stops_before_it_does_anything_is_ended_too(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """0.5.0: the launcher waited for it for 30 s: it had not yet said which process it is."""
    file = tmp_path / "rank.py"
    early = "import os, signal\nif os.environ['RANK'] == '1':\n    os.kill(os.getpid(), signal.SIGSTOP)\n"
    file.write_text(
        early + PRELUDE + 'fail(StalledPeerError("rank 0 waiting", "rank 1 did not come", "See"))'
    )
    began = time.monotonic()
    assert launch(2, [sys.executable, str(file)]) == 1
    assert time.monotonic() - began < 30  # with the start of the server
    assert capfd.readouterr().err == "penstock: error: rank 0 waiting: rank 1 did not come. See\n"


@pytest.mark.usefixtures("soon")
def test_relaunch_runs_the_same_script_with_its_arguments(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "example.py"
    file.write_text("""
import os, sys, time
from penstock.launch.start import relaunch
from penstock.errors import ConfigError
relaunch(2)
os.write(1, f"{os.environ['RANK']} {sys.argv[1:]}\\n".encode())
spoken = __file__ + ".spoken"  # or rank 0 is ended before it has said a word
if os.environ["RANK"] == "0":
    open(spoken, "w").close()
while not os.path.exists(spoken):
    time.sleep(0.01)
if os.environ["RANK"] == "1":
    raise ConfigError("--depth=0", "it is too small", "Give 1")
time.sleep(600)
""")
    monkeypatch.setattr(sys, "orig_argv", ["python", str(file), "--depth=0"])
    with pytest.raises(SystemExit) as ended:
        relaunch(2)
    assert ended.value.code == 2
    said = capfd.readouterr()
    assert sorted(said.out.splitlines()) == ["0 ['--depth=0']", "1 ['--depth=0']"]
    assert said.err == "penstock: error: rank 1: --depth=0: it is too small. Give 1\n"


def launch_in(folder: str, command: list[str]) -> None:
    """Launch two ranks from `folder`; stderr goes to a file there."""
    os.chdir(folder)
    os.dup2(os.open("stderr", os.O_CREAT | os.O_WRONLY), 2)
    sys.exit(launch(2, command))


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [
        pytest.param(signal.SIGINT, 130, "penstock: interrupted\n", marks=pytest.mark.sweep),
        pytest.param(signal.SIGTERM, 143, "penstock: ended by SIGTERM\n", marks=pytest.mark.sweep),
        (signal.SIGKILL, -9, ""),
    ],
)
@pytest.mark.fault("the whole job is ended", "Ctrl-C, SIGTERM, SIGKILL of the launcher")
def test_a_signal_ends_the_ranks_too(tmp_path: Path, number: signal.Signals, code: int, said: str) -> None:
    text = """
open(f"started-{rank}", "w").write(str(os.getpid()))
try:
    time.sleep(600)
except KeyboardInterrupt as error:
    fail(error)
"""
    parent = start(launch_in, str(tmp_path), script(tmp_path, text))
    files = [tmp_path / "started-0", tmp_path / "started-1"]
    end = time.monotonic() + 60
    while not all(file.exists() and file.read_text() for file in files) and time.monotonic() < end:
        time.sleep(0.05)
    pids = [int(file.read_text()) for file in files]
    os.kill(parent.pid, number)
    parent.join(20)
    assert (parent.exitcode, (tmp_path / "stderr").read_text()) == (code, said)
    assert wait_until_gone(pids, 5) == []


def test_what_stderr_says() -> None:
    error = ConfigError("a=1", "it is wrong", "Give 2")
    assert describe(error) == "penstock: error: a=1: it is wrong. Give 2"
    assert describe(error, 3) == "penstock: error: rank 3: a=1: it is wrong. Give 2"
    lost = PeerLostError("rank 1", "gone", "Look")
    assert [exit_code(e) for e in (error, lost, KeyboardInterrupt(), OSError())] == [2, 1, 130, 1]
