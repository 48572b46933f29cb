"""Where the time of a run went: the arithmetic, from records made up by hand, and what shows it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from penstock.train.records.metrics import MetricsRow
from penstock.train.report.lost_time import CAUSES, lost_time
from penstock.train.report.recorded import read_run
from support.recorded_runs import html, row, write


def moment(seconds: float) -> str:
    return f"2026-01-02T03:{int(seconds) // 60:02}:{seconds % 60:06.3f}+00:00"


def start(
    began: float, at: float, end: float | None = None, how: str = "killed", **more: Any
) -> dict[str, Any]:
    ended = {} if end is None else {"end": {"at": moment(end), "how": how, "why": ""}}
    return {"began": moment(began), "at": moment(at), "step": 0, "processes": 2, **ended, **more}


def lost(
    folder: Path, *rows: MetricsRow, starts: list[dict[str, Any]]
) -> tuple[float, dict[str, float], float]:
    """Seconds, those lost by cause where there are some, and the effective share in percent."""
    account = lost_time(read_run(write(folder, *rows, timeline=False, starts=starts)))
    assert account is not None
    assert account.lost.keys() == CAUSES.keys()
    return account.seconds, {k: round(v, 6) for k, v in account.lost.items() if v}, 100 * account.effective


def test_the_time_of_a_run_is_its_start_up_and_what_lies_between_first_step_and_end(tmp_path: Path) -> None:
    rows = (
        {"step": 0, "held_out_loss": 5.5, "seconds": 1.0},
        row(1),
        row(2),
        {"step": 2, "sample": "a", "seconds": 0.5},
        {"step": 2, "checkpoint": "step-00000002", "seconds": 2.0},
        row(3, memory_checkpoint_seconds=0.25),
    )  # fmt: skip
    assert lost(tmp_path, *rows, starts=[start(0, 5, 20, "finished")]) == (
        20, {"start-up": 5, "checkpoints": 2.25, "evaluation": 1.5}, 56.25,
    )  # fmt: skip


def test_after_a_fault_the_wait_and_the_steps_done_again_are_lost(tmp_path: Path) -> None:
    """The second start has dropped rows of 3 s. Between the third and its resume the run was to stand."""
    starts = [
        start(0, 4, 14),
        start(15.5, 16, 26, "failed", again=3.0),
        start(26.25, 27, 37, "interrupted"),
        start(50, 51, 60, "finished", again=0.0),
    ]
    assert lost(tmp_path, row(1), starts=starts) == (
        4 + 10 + 1.5 + 0.5 + 10 + 0.25 + 0.75 + 10 + 1 + 9,
        {"start-up": 6.25, "waiting": 1.75, "steps again": 3},
        100 * (1 - 11 / 47),
    )  # fmt: skip


def test_rows_that_later_ones_replace_were_done_again(tmp_path: Path) -> None:
    """As after a spike of the loss, when the run goes back to a checkpoint. An evaluation counts once."""
    rows = (row(1), row(2), {"step": 2, "held_out_loss": 1.0, "seconds": 1.5}, row(3), row(2), row(3))
    assert lost(tmp_path, *rows, starts=[start(0, 0, 100, "finished")])[1] == {"steps again": 5.5}


def test_a_run_without_an_end_counts_to_its_last_row(tmp_path: Path) -> None:
    def seconds() -> float:
        account = lost_time(read_run(tmp_path))
        assert account is not None
        return account.seconds

    write(tmp_path, row(1), timeline=False, starts=[start(0, 4)])
    began = lost_time(read_run(tmp_path))
    assert began is not None
    last = (tmp_path / "metrics.jsonl").stat().st_mtime - began.seconds
    os.utime(tmp_path / "metrics.jsonl", (last + 30, last + 30))
    assert seconds() == pytest.approx(30, abs=1e-3)
    os.utime(tmp_path / "metrics.jsonl", (last - 90, last - 90))  # as of another clock
    assert seconds() == pytest.approx(4, abs=1e-3)


def test_a_record_of_an_older_version_has_no_start_up_and_no_wait(tmp_path: Path) -> None:
    starts = [
        {"at": "2026-01-02T03:00:00+0000"},
        {"at": "2026-01-02T03:00:10+0000", "end": {"at": moment(20)}},
    ]
    (tmp_path / "old").mkdir()
    os.utime(write(tmp_path / "old", row(1), timeline=False, starts=starts) / "metrics.jsonl", (0, 0))
    account = lost_time(read_run(tmp_path / "old"))
    assert account is not None
    assert account.effective == 1


@pytest.mark.parametrize(
    "spoilt", [{"at": 3}, {}, {"at": "yesterday"}, {"at": moment(0), "end": {"at": None}}]
)
def test_a_start_that_cannot_be_read_gives_no_account(tmp_path: Path, spoilt: dict[str, Any]) -> None:
    folder = write(tmp_path / "run", row(1), starts=[start(0, 1, 2), spoilt])
    assert lost_time(read_run(folder)) is None
    assert "Time lost" not in html(folder)


def test_the_page_and_the_words_have_each_cause(tmp_path: Path) -> None:
    folder = write(
        tmp_path / "run", row(1), starts=[start(0, 5, 15), start(16, 17, 27, "finished", again=2.7)]
    )
    account = lost_time(read_run(folder))
    assert (
        str(account)
        == "27 s, of which 64.1% were effective (lost: start-up 6 s, waiting 1 s, steps again 2.7 s)"
    )
    text = re.sub("<[^>]*>", " ", html(folder))
    for words in ("Time lost", "start-up", "64.1% were effective", "Effective time"):
        assert words in text, words


def test_a_time_that_went_backwards_costs_nothing(tmp_path: Path) -> None:
    """A clock was set back between two starts."""
    starts = [start(50, 55, 60), start(20, 10, 30, "finished")]
    assert lost(tmp_path, row(1), starts=starts) == (30, {"start-up": 5}, 100 * (1 - 5 / 30))
