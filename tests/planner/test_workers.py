"""Forked processes answer as this one would."""

from __future__ import annotations

import os
import time

import pytest
import torch

from penstock.errors import ConfigError, RunError
from penstock.planner import workers
from penstock.planner.workers import forked, processors
from support.refusals import refuses

KNOWN = {"base": 0}


@pytest.fixture
def _forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forks, also where another test has run a backward with a torch that has CUDA: none runs one here."""
    monkeypatch.setattr(workers, "_forks_run_backwards", lambda: True)  # private: no other way to say so


@pytest.mark.usefixtures("_forks")
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_results_come_in_the_order_of_the_arguments(processes: int) -> None:
    def square(number: int) -> int:
        return number * number

    with forked(square, processes) as squares:
        assert squares(range(8)) == [number * number for number in range(8)]
        assert squares([3]) == [9]
        assert squares([]) == []


@pytest.mark.usefixtures("_forks")
def test_a_process_knows_what_this_one_knew_when_it_was_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KNOWN, "base", 40)

    def more(number: int) -> tuple[int, int]:
        return os.getpid(), KNOWN["base"] + number

    with forked(more, 2) as sums:
        monkeypatch.setitem(KNOWN, "base", 0)
        pids, numbers = zip(*sums([1, 2, 3]), strict=True)
    assert numbers == (41, 42, 43)
    assert len({*pids, os.getpid()}) == 3
    with pytest.raises(ProcessLookupError):  # ended, and waited for
        os.kill(pids[0], 0)


@pytest.mark.parametrize("processes", [1, 2])
def test_an_error_is_raised_here_and_others_may_follow(processes: int) -> None:
    def half(number: int) -> int:
        if number % 2:
            raise ConfigError(str(number), "it is odd", "Take an even one")
        return number // 2

    with forked(half, processes) as halves:
        with refuses(ConfigError, rule="it is odd"):
            halves([2, 4, 5])
        assert halves([2, 4]) == [1, 2]


@pytest.mark.usefixtures("_forks")
def test_a_process_that_is_free_takes_the_next_argument() -> None:
    """One long argument, and short ones behind it: the other process takes all of these."""

    def sleep(seconds: float) -> int:
        time.sleep(seconds)
        return os.getpid()

    with forked(sleep, 2) as pids:
        long, *short = pids([2.0, 0.0, 0.0, 0.0, 0.0])
    assert long not in short
    assert len({*short}) == 1


@pytest.mark.usefixtures("_forks")
def test_a_process_that_is_killed_is_an_error_that_says_so() -> None:
    def die(number: int) -> int:
        if number:
            os._exit(1)
        return number

    with (
        forked(die, 2) as deaths,
        refuses(RunError, "a process of the search", rule="ended before it"),
    ):
        deaths([0, 1])


def test_nothing_is_forked_where_a_fork_runs_no_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an H200 each plan failed: torch refuses a backward in a process forked after one."""

    def refuse(*_: object) -> None:
        raise RuntimeError("Unable to handle autograd's threading")

    monkeypatch.setattr(torch.Tensor, "backward", refuse)
    with forked(lambda _: os.getpid(), 2) as ids:
        assert set(ids(range(4))) == {os.getpid()}


def test_a_machine_has_a_processor() -> None:
    assert 1 <= processors() <= 8
