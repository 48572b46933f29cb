"""Starts a run again after a failure, without a person, from its newest checkpoint.

    attempt -> fails -> wait -> attempt -> ...     until a run ends by itself, or a signal ends it, or it
                                                   fails too often without a new checkpoint in between

restarts.jsonl has a line for each failure, and for each time that a signal stopped the run: the attempt, its
exit code and cause, and the step of the newest checkpoint then. What the failures cost is in the run's own
records (`train/report/lost_time.py`).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from penstock.errors import InputError
from penstock.launch.failures import STOPPED
from penstock.launch.start import Ended, Launcher

FILE = "restarts.jsonl"
_LONGEST = 60.0  # seconds to wait before a restart


class Saved(NamedTuple):
    """The step of the newest checkpoint; 0 without one. last: whether it is the run's last step"""

    step: int = 0
    last: bool = False


def keep_running(
    launcher: Launcher,
    ranks: int,
    command: Callable[[int], list[str]],
    restarts: int,
    newest: Callable[[], Saved],
    folder: Path,
) -> int:
    """Run `ranks` copies of a command on this machine, and again after each failure. See `launch`.

    Wrong input, or a signal to this process, ends it. After a signal to a rank alone the run goes on.

    Args:
        command: function from an attempt's number, from 0, to its command
        restarts: the most in a row, without a new checkpoint in between
        newest: returns the newest checkpoint; Saved() if there is none
        folder: of the run, which gets restarts.jsonl

    Returns: the exit code of the last attempt; 0 where one failed after the run's last checkpoint
    """
    causes = list[str]()
    attempt, saved = 0, newest()
    while True:
        ended = launcher.attempt(ranks, command(attempt), attempt)
        over = ended.asked or not ended.cause or ended.code == InputError.exit_code
        before, saved = saved, newest()
        causes = [*(causes if saved.step == before.step else ()), ended.cause]
        if not over or (ended.cause and ended.asked):
            _note(folder, attempt, ended, saved)
        if over:
            return _restarted(attempt, ended.code)
        if saved.last:
            print(f"penstock: all {saved.step} steps are done and saved; then {ended.cause}", file=sys.stderr)
            return 0
        if len(causes) > restarts:
            print(_hopeless(causes, saved), file=sys.stderr)
            return ended.code
        attempt, wait = attempt + 1, _wait(len(causes))
        print(_next(attempt, wait, saved), file=sys.stderr, flush=True)
        if stopped := launcher.wait(wait):
            return _restarted(attempt, STOPPED if saved.step else 128 + stopped)


def _wait(failed: int) -> float:
    """Seconds before the next attempt, after `failed` ones since the last new checkpoint: 0, 1, 2, 4, ..."""
    return min(_LONGEST, 2.0 ** (failed - 2)) if failed > 1 else 0.0


def _next(attempt: int, wait: float, saved: Saved) -> str:
    when = f"in {wait:.0f} s" if wait else "at once"
    origin = f"from the checkpoint of step {saved.step}" if saved.step else "from the beginning"
    return f"penstock: restart {attempt} {when}, {origin}"


def _restarted(restarts: int, code: int) -> int:
    """Say how often the run was restarted, if it was. Returns the code."""
    if restarts:
        times = "once" if restarts == 1 else f"{restarts} times"
        print(f"penstock: restarted {times}", file=sys.stderr)
    return code


def _note(folder: Path, attempt: int, ended: Ended, saved: Saved) -> None:
    row: dict[str, Any] = {
        "attempt": attempt, "at": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "exit_code": ended.code,
        "cause": ended.cause, "checkpoint": saved.step,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def _hopeless(causes: list[str], saved: Saved) -> str:
    since = f"since the checkpoint of step {saved.step}" if saved.step else "before the first checkpoint"
    first = "" if causes[0] == causes[-1] else f"\n  the first cause: {causes[0]}"
    return (
        f"penstock: given up after {len(causes)} failures in a row {since}{first}"
        f"\n  the last cause: {causes[-1]}"
    )
