"""What signals ask of a process: once to save and to end in time, twice to end at once."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from penstock.errors import RunError
from penstock.launch.stop import Stop
from support.pool import start

LATE = RunError("train.stop_seconds=0.2", "there is no checkpoint within this time", "Give more")


def in_block(folder: str, seconds: float, *signals: int) -> None:
    """A process that gets signals as it trains, and that ends by itself with 9 once it is asked to."""
    os.dup2(os.open(f"{folder}/stderr", os.O_CREAT | os.O_WRONLY), 2)
    with Stop() as stop, stop.saves(seconds, LATE):
        for number in signals:
            if stop.number:
                stop._came -= 2  # it came some time ago
            os.kill(os.getpid(), number)
            while not stop.number:
                time.sleep(0.01)
        while len(signals) > 1 or seconds < 1:
            time.sleep(0.01)
    sys.exit(9 if stop.number == signals[0] else 8)


@pytest.mark.parametrize(
    ("seconds", "signals", "code", "said"),
    [
        (60, [signal.SIGTERM], 9, "penstock: SIGTERM: a checkpoint after this step, then the end"),
        (60, [signal.SIGUSR1], 9, "penstock: SIGUSR1: a checkpoint"),
        (60, [signal.SIGINT], 9, "penstock: SIGINT: a checkpoint"),
        (60, [signal.SIGUSR1, signal.SIGTERM], 143, "a second signal ends at once"),
        (0.2, [signal.SIGTERM], 1, "train.stop_seconds=0.2: there is no checkpoint within this time. Give"),
    ],
)
def test_a_process_that_trains_is_asked_to_stop(
    tmp_path: Path, seconds: float, signals: list[int], code: int, said: str
) -> None:
    process = start(in_block, str(tmp_path), seconds, *signals)
    process.join(30)
    assert process.exitcode == code
    assert said in (tmp_path / "stderr").read_text()


def in_block_with_many_files(folder: str) -> None:
    for _ in range(1100):
        os.dup(0)
    in_block(folder, 60, signal.SIGTERM)


def test_a_process_with_many_open_files_is_asked_to_stop(tmp_path: Path) -> None:
    """0.5.0: the thread that reads signals failed, and a signal was lost."""
    process = start(in_block_with_many_files, str(tmp_path))
    process.join(30)
    code = process.exitcode
    process.kill()
    assert code == 9


def twice(folder: str) -> None:
    """The same signal comes from a scheduler, to all processes, and from the launcher."""
    with Stop() as stop, stop.saves(60, LATE):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            while not stop.number:
                time.sleep(0.01)
        time.sleep(0.2)  # it would have ended by now
    sys.exit(9)


def test_a_signal_that_comes_twice_at_a_time_is_one(tmp_path: Path) -> None:
    process = start(twice, str(tmp_path))
    process.join(30)
    assert process.exitcode == 9


# _thread: that it has ended is seen in no other way
def test_handlers_are_as_before_and_nothing_listens() -> None:
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    with Stop() as stop, stop.saves(60, LATE):
        assert [signal.getsignal(number) for number in numbers] != before
    assert [signal.getsignal(number) for number in numbers] == before
    assert not stop._thread.is_alive()


def notices_the_failure_itself() -> None:
    os.environ |= {"RANK": "0", "WORLD_SIZE": "2"}
    try:
        with Stop():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)
            raise ValueError("another rank is gone")
    except ValueError:
        sys.exit(7)


def test_a_rank_that_notices_another_ones_failure_itself_ends_at_once_with_its_own_error() -> None:
    """Unreleased: it waited for the two seconds that it has for this, and lost its error and its last ops."""
    process = start(notices_the_failure_itself)
    process.join(30)
    assert process.exitcode == 7


def ended_before_it_trains() -> None:
    with Stop():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)


def test_a_process_that_has_nothing_to_save_just_ends() -> None:
    process = start(ended_before_it_trains)
    process.join(30)
    assert process.exitcode == 143
