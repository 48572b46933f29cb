"""A run that fails is started again, from its newest checkpoint, until it fails too often in one place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.launch.restarts import FILE, Saved, keep_running
from penstock.launch.start import Ended, Launcher

Story = list[tuple[Ended, int]]  # of each attempt: how it ended, and the step of the newest checkpoint then


class Told(Launcher):
    """What `keep_running` did where attempts end as a story has it.

    signal: that comes in the first wait; last: step of the run
    """

    def __init__(
        self, story: Story, allowed: int, folder: Path, signal: int = 0, last: int | None = None
    ) -> None:
        self.commands: list[list[str]] = []
        self.waits: list[float] = []
        self._step, self._signal, self._last, self._endings = 0, signal, last, iter(story)
        self.code = keep_running(self, 2, lambda number: [f"attempt {number}"], allowed, self._newest, folder)
        assert next(self._endings, None) is None, "all attempts were made"

    def attempt(self, ranks: int, command: list[str], number: int = 0) -> Ended:
        self.commands.append([str(ranks), *command])
        ended, self._step = next(self._endings)
        return ended

    def wait(self, seconds: float) -> int:
        self.waits.append(seconds)
        return self._signal

    def _newest(self) -> Saved:
        return Saved(self._step, self._step == self._last)


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / FILE).read_text().splitlines()]


KILLED, STALLED, WRONG = Ended(137, "rank 1 was killed"), Ended(1, "rank 0 stalled"), Ended(2, "a wrong key")
STOPPED = Ended(75, "after step 4 of 9: rank 1 got SIGTERM")


def test_a_run_goes_on_after_failures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = Told([(KILLED, 4), (STALLED, 8), (Ended(0), 12)], 1, tmp_path)
    assert told.code == 0
    assert told.commands == [["2", f"attempt {number}"] for number in range(3)]
    found = [(row["attempt"], row["exit_code"], row["cause"], row["checkpoint"]) for row in rows(tmp_path)]
    assert found == [(0, 137, "rank 1 was killed", 4), (1, 1, "rank 0 stalled", 8)]
    said = capsys.readouterr().err
    assert "restart 1 at once, from the checkpoint of step 4" in said
    assert "restarted 2 times" in said


def test_waits_grow_until_there_is_a_new_checkpoint(tmp_path: Path) -> None:
    story = [*[(KILLED, 0)] * 8, (KILLED, 4), (KILLED, 4), (Ended(0), 4)]
    assert Told(story, 8, tmp_path).waits == [0, 1, 2, 4, 8, 16, 32, 60, 0, 1]


def test_a_failure_after_the_last_checkpoint_ends_a_run_that_is_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was started again, refused as there was no step left to do, and counted as failed."""
    told = Told([(KILLED, 9)], 3, tmp_path, last=9)
    assert (told.code, told.waits) == (0, [])
    said = "penstock: all 9 steps are done and saved; then rank 1 was killed"
    assert said in capsys.readouterr().err
    assert [row["checkpoint"] for row in rows(tmp_path)] == [9]


def test_failures_in_one_place_are_given_up_with_both_causes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = Told([(KILLED, 4), (KILLED, 4), (STALLED, 4)], 2, tmp_path)
    assert told.code == 1
    assert capsys.readouterr().err.splitlines()[-3:] == [
        "penstock: given up after 3 failures in a row since the checkpoint of step 4",
        "  the first cause: rank 1 was killed",
        "  the last cause: rank 0 stalled",
    ]
    assert len(rows(tmp_path)) == 3


@pytest.mark.parametrize("ended", [WRONG, Ended(130), Ended(143), Ended(0)])
def test_wrong_input_and_signals_are_no_reason_to_start_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ended: Ended
) -> None:
    assert Told([(ended, 0)], 3, tmp_path).code == ended.code
    assert capsys.readouterr().err == ""
    assert not (tmp_path / FILE).exists()


def test_a_run_that_was_asked_to_stop_is_not_started_again_and_the_file_says_so(tmp_path: Path) -> None:
    assert Told([(STOPPED._replace(asked=True), 4)], 3, tmp_path).code == 75
    (row,) = rows(tmp_path)
    assert (row["exit_code"], row["cause"], row["checkpoint"]) == (75, STOPPED.cause, 4)


def test_a_run_one_rank_of_which_was_asked_to_stop_goes_on(tmp_path: Path) -> None:
    """Somebody ended that rank, and not the run."""
    assert Told([(STOPPED, 4), (Ended(0), 9)], 1, tmp_path).code == 0
    (row,) = rows(tmp_path)
    assert (row["exit_code"], row["checkpoint"]) == (75, 4)


@pytest.mark.parametrize(("step", "code"), [(4, 75), (0, 143)])
def test_a_signal_between_two_attempts_ends_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], step: int, code: int
) -> None:
    told = Told([(KILLED, step)], 3, tmp_path, signal=15)
    assert (told.code, told.waits) == (code, [0])
    assert "restarted once" in capsys.readouterr().err
