"""Starts a run again after a failure, without a person, from its newest checkpoint.

    attempt -> fails -> wait -> attempt -> ...     until a run ends by itself, or a signal ends it, or it
                                                   fails too often without a new checkpoint in between

restarts.jsonl has a line for each failure, and for each time that a signal stopped the run: the attempt, its
exit code and cause, the step of the newest checkpoint then, and the seconds lost to start-up, to steps that
are done again, and to waiting.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from penstock.errors import InputError
from penstock.launch.failures import STOPPED
from penstock.launch.start import Ended, Launcher

FILE = "restarts.jsonl"
_LONGEST = 60.0  # seconds to wait before a restart; the first one comes after one second


class LostTime(NamedTuple):
    """Seconds lost by failures: to start-up, to steps that are done again, to waiting."""

    start_up: float = 0.0
    steps_again: float = 0.0
    wait: float = 0.0


class Saved(NamedTuple):
    """The newest checkpoint.

    at: when it was written, in seconds of time.time(); last: whether it is of the run's last step
    """

    step: int = 0
    at: float = 0.0
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
        folder: of the run: has run.json, and gets restarts.jsonl

    Returns: the exit code of the last attempt; 0 where one failed after the run's last checkpoint
    """
    began, lost, causes = time.time(), LostTime(), list[str]()
    attempt, saved = 0, newest()
    while True:
        started = time.time()
        ended = launcher.attempt(ranks, command(attempt), attempt)
        start_up = _start_up(folder, started)
        over = ended.asked or not ended.cause or ended.code == InputError.exit_code
        before, saved = saved, newest()
        causes = [*(causes if saved.step == before.step else ()), ended.cause]
        again = 0.0 if ended.code == STOPPED else time.time() - max(saved.at, started + start_up)
        given_up, wait = len(causes) > restarts, min(_LONGEST, 2.0 ** (len(causes) - 1))
        newly = LostTime(start_up, max(0.0, again), 0.0 if over or given_up or saved.last else wait)
        if not over or (ended.cause and ended.asked):
            _note(folder, attempt, ended, saved, newly)
        if over:
            if attempt:
                lost = lost._replace(start_up=lost.start_up + start_up)
                print(_account(attempt, lost, time.time() - began), file=sys.stderr)
            return ended.code
        if saved.last:
            print(f"penstock: all {saved.step} steps are done and saved; then {ended.cause}", file=sys.stderr)
            return 0
        if given_up:
            print(_hopeless(causes, saved), file=sys.stderr)
            return ended.code
        lost = LostTime(*map(sum, zip(lost, newly, strict=True)))
        attempt += 1
        origin = f"from the checkpoint of step {saved.step}" if saved.step else "from the beginning"
        print(f"penstock: restart {attempt} in {wait:.0f} s, {origin}", file=sys.stderr, flush=True)
        if stopped := launcher.wait(wait):
            print(_account(attempt, lost, time.time() - began), file=sys.stderr)
            return STOPPED if saved.step else 128 + stopped


def _start_up(folder: Path, started: float) -> float:
    """Seconds from the start of an attempt to its first step, or to now without one."""
    now = time.time()
    try:
        run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        at = datetime.fromisoformat(run["starts"][-1]["at"]).timestamp()
    except (OSError, ValueError, LookupError, TypeError):
        at = 0.0
    return (at if started - 1 <= at <= now else now) - started  # it has whole seconds


def _note(folder: Path, attempt: int, ended: Ended, saved: Saved, lost: LostTime) -> None:
    row: dict[str, Any] = {
        "attempt": attempt, "at": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "exit_code": ended.code,
        "cause": ended.cause, "checkpoint": saved.step,
        "lost_seconds": {name: round(max(0.0, seconds), 1) for name, seconds in lost._asdict().items()},
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def _account(restarts: int, lost: LostTime, seconds: float) -> str:
    times = "once" if restarts == 1 else f"{restarts} times"
    start_up, again, wait = (f"{max(0.0, part):.0f} s" for part in lost)
    share = max(0.0, 1 - sum(lost) / max(seconds, 1e-9))
    return (
        f"penstock: restarted {times}; of {seconds:.0f} s {share:.0%} were effective "
        f"(start-up {start_up}, steps done again {again}, waits {wait})"
    )


def _hopeless(causes: list[str], saved: Saved) -> str:
    since = f"since the checkpoint of step {saved.step}" if saved.step else "before the first checkpoint"
    first = "" if causes[0] == causes[-1] else f"\n  the first cause: {causes[0]}"
    return (
        f"penstock: given up after {len(causes)} failures in a row {since}{first}"
        f"\n  the last cause: {causes[-1]}"
    )
