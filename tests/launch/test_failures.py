"""The one summary of what ranks record."""

from __future__ import annotations

import errno
import json
import signal
import socket
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing import ProcessFailure

from penstock.errors import ConfigError, FailurePoint, PeerLostError, RunError, StalledPeerError, give_account
from penstock.launch import failures
from penstock.launch.failures import Failure

HOST = socket.gethostname()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(failures.ERROR_FILE, raising=False)
    return tmp_path


def error_file(folder: Path, rank: int) -> Path:
    (folder / str(rank)).mkdir(exist_ok=True)
    return folder / str(rank) / "error.json"


def ends(folder: Path, rank: int, code: int, error: BaseException | None = None) -> Failure:
    file = error_file(folder, rank)
    if error is not None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(failures.ERROR_FILE, str(file))
            failures.record(error)
    return Failure(code, time.time(), file)


def lost(rank: int, reports: dict[int, str]) -> PeerLostError:
    error = PeerLostError(f"rank {rank} waiting for 2B0 from rank 2", "it is gone", "Look at it")
    error.rank, error.reports = rank, reports
    give_account(
        error, FailurePoint(f"waiting for 2B0 from rank {rank + 1}, steady phase", "3 of 12 ops done")
    )
    return error


def test_the_others_report_a_killed_rank(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ended = {
        0: ends(folder, 0, 1, lost(0, {2: "last reported 0.9 s ago: in 2F3"})),
        1: ends(folder, 1, 1, lost(1, {2: "last reported 1.4 s ago: in 2F3", 3: "last reported 1 s ago"})),
        2: ends(folder, 2, -signal.SIGKILL),
        3: ends(folder, 3, 128 + signal.SIGTERM),
        4: ends(folder, 4, -signal.SIGTERM),
    }
    assert failures.report(ended)[0] == 137
    assert capsys.readouterr().err.splitlines() == [
        f"penstock: error: rank 2 on {HOST} was killed by signal 9 (SIGKILL), "
        "last reported 1.4 s ago: in 2F3",
        "What the ranks did last:",
        "  rank 0 waiting for 2B0 from rank 1, steady phase; 3 of 12 ops done",
        "  rank 1 waiting for 2B0 from rank 2, steady phase; 3 of 12 ops done",
        "  rank 2 last reported 1.4 s ago: in 2F3",
        "  rank 3 last reported 1 s ago",
        "  rank 4 left no report",
    ]


def test_a_rank_that_raised_comes_before_those_that_lost_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = ends(folder, 0, 1, lost(0, {1: "last reported 0.1 s ago: in 1F1"}))
    with pytest.raises(ZeroDivisionError) as caught:
        1 / 0  # noqa: B018
    account = FailurePoint("in 1F1, warm-up", "1 of 4 ops done", "timeline so far in x/rank-1.json")
    give_account(caught.value, account)
    assert failures.report({0: first, 1: ends(folder, 1, 1, caught.value)})[0] == 1
    lines = capsys.readouterr().err.splitlines()
    assert (
        lines[0] == f"penstock: error: rank 1 on {HOST}: ZeroDivisionError: division by zero, in 1F1, warm-up"
    )
    assert lines[3] == "  rank 1 in 1F1, warm-up; 1 of 4 ops done; timeline so far in x/rank-1.json"
    assert lines[4].startswith("Traceback")
    assert lines[-1] == "ZeroDivisionError: division by zero"


def test_a_stall_is_reported_with_what_the_silent_rank_did(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = StalledPeerError("rank 0 waiting for 1B0 from rank 1", "rank 1 has been silent for 4 s", "See")
    error.rank, error.peer_report = 0, "rank 1 last reported 4.0 s ago: in 1F0"
    late = ends(folder, 1, -signal.SIGKILL)._replace(killed=True)
    assert failures.report({0: ends(folder, 0, 1, error), 1: late})[0] == 1
    assert capsys.readouterr().err == (
        "penstock: error: rank 0 waiting for 1B0 from rank 1: rank 1 has been silent for 4 s. See\n"
        "  rank 1 last reported 4.0 s ago: in 1F0\n"
    )


def test_what_fails_in_a_rank_that_was_being_ended_is_no_cause(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failures.ending_file(str(error_file(folder, 0))).touch()
    ended = {0: ends(folder, 0, 1, OSError("a worker was ended")), 1: ends(folder, 1, 7)}
    assert failures.report(ended)[0] == 7
    assert capsys.readouterr().err == f"penstock: error: rank 1 on {HOST} ended with exit code 7\n"


def test_a_rank_that_was_ended_from_elsewhere_is_the_cause(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """0.5.0: "the other ranks died or closed their connections": SIGTERM was always the launcher's."""
    for rank, since in ((1, time.time() - 2), (2, time.time() + 2)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(failures.ERROR_FILE, str(error_file(folder, rank)))
            failures.record_end(since)
    ended = {
        0: ends(folder, 0, 1, lost(0, {1: "last reported 0.9 s ago: in 1F3"})),
        1: ends(folder, 1, 128 + signal.SIGTERM),
        2: ends(folder, 2, 128 + signal.SIGTERM),
    }
    assert failures.report(ended)[0] == 128 + signal.SIGTERM
    first = capsys.readouterr().err.splitlines()[0]
    assert first == (
        f"penstock: error: rank 1 on {HOST} was ended by SIGTERM, last reported 0.9 s ago: in 1F3"
    )


def test_what_all_ranks_raise_is_told_of_all(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """0.5.0: a NaN in a gradient of rank 0 was told of rank 2, which was the first to end."""
    error = RunError("step 3: grad_norm=nan", "these are finite, not those of rank 0", "Lower the rate")
    assert failures.report({rank: ends(folder, rank, 1, error) for rank in (2, 0, 1)})[0] == 1
    assert capsys.readouterr().err == f"penstock: error: ranks 0, 1, 2 on {HOST}: {error}\n"


def test_nothing_is_recorded_without_a_launcher(folder: Path) -> None:
    failures.record(ConfigError("a=1", "it is wrong", "Give 2"))
    assert not list(folder.iterdir())


def test_torchruns_launcher_can_read_what_is_recorded(folder: Path) -> None:
    file = ends(folder, 0, 2, ConfigError("a=1", "it is wrong", "Give 2")).file
    failure = ProcessFailure(0, 1000, 2, str(file))
    assert failure.error_file_data["message"]["message"] == "a=1: it is wrong. Give 2"
    assert json.loads(error_file(folder, 0).read_text())["message"]["extraInfo"]["timestamp"].isdigit()


def test_an_error_that_names_its_rank_is_not_given_that_of_who_raised_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """0.5.0: "rank 2" stood before a gradient of rank 0 that was not finite: rank 2 said it first."""
    error = RunError("step 3: grad_norm=nan", "gradients are finite: not those of rank 0 on here", "Lower it")
    error.names_rank = True
    assert failures.report({0: ends(folder, 0, -signal.SIGTERM), 2: ends(folder, 2, 1, error)})[0] == 1
    said = capsys.readouterr().err
    assert said.startswith(f"penstock: error: {error}\n")
    assert failures.describe(error, rank=2) == f"penstock: error: {error}"


def test_a_rank_that_ran_out_of_something_says_so_without_a_traceback(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """0.5.0: "OSError: [Errno 24] Too many open files" with a traceback, or a bare "MemoryError: "."""
    ended = {
        0: ends(folder, 0, 1, lost(0, {})),
        1: ends(folder, 1, 1, OSError(errno.EMFILE, "Too many open files")),
    }
    assert failures.report(ended)[0] == 1
    said = capsys.readouterr().err
    assert said.startswith(f"penstock: error: rank 1 on {HOST}: ulimit -n ")
    assert "Traceback" not in said
    assert "MemoryError" in failures.describe(MemoryError())
    assert "()" not in failures.describe(MemoryError())


def test_a_rank_that_was_killed_for_memory_is_named_with_that(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    killed = ends(folder, 1, -signal.SIGKILL)._replace(for_memory=True)
    assert failures.report({1: killed})[0] == 137
    assert "(SIGKILL), as memory ran out: the kernel has killed" in capsys.readouterr().err
