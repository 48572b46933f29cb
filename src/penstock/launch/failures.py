"""Why ranks failed: what each leaves where torchrun's launcher looks for it, and the one summary made of all.

penstock: error: <the first cause>
What the ranks did last:
  rank 0 waiting for 1B0 from rank 1, steady phase; 4 of 12 ops done, the last 0F1 0F2 0F3
  rank 1 ...
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from penstock.errors import PeerError, PeerLostError, PenstockError, account_of

INTERRUPTED = 130  # what shells give a command that Ctrl-C ended
GRACE_SECONDS = 3  # from the first failure to the end of ranks that do not end by themselves
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_ENDING_FILE = "ending"  # beside the error file: there once the rank was told to end
_ENDED = (-signal.SIGTERM, 128 + signal.SIGTERM)  # exit codes of ranks that were told to end, and did


class Cause(NamedTuple):
    """Why one rank failed. The lowest cause is the first one: `order` is its kind, then comes the time.

    where: the op and phase that the rank was in, empty where the message says it or nobody knows
    """

    order: int
    time: float
    rank: int
    message: str
    where: str
    traceback: str
    exit_code: int

    def __str__(self) -> str:
        return f"{self.message}, {self.where}" if self.where else self.message


class Last(NamedTuple):
    """What a rank did last, by its own word or, with the time at which it was read, by another's."""

    own: bool
    time: float
    text: str


def exit_code(error: BaseException) -> int:
    if isinstance(error, PenstockError):
        return error.exit_code
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1


def describe(error: BaseException, rank: int | None = None) -> str:
    """The text for stderr: one `penstock: error:`, after the traceback where the error is not a typed one."""
    where = "" if rank is None or isinstance(error, PeerError) else f"rank {rank}: "
    text = str(error) if isinstance(error, PenstockError) else _brief(error)
    return f"{_traceback(error)}penstock: error: {where}{text}"


def record(error: BaseException) -> None:
    """Write `error` where torchrun's launcher reads it, in its own form and with fields of ours."""
    path, now = os.environ.get(ERROR_FILE), time.time()
    if not path:
        return
    account = account_of(error)
    ours = {
        "time": now,
        "message": _brief(error),
        "traceback": _traceback(error),
        "secondary": isinstance(error, PeerLostError | KeyboardInterrupt) or told_to_end(path).exists(),
        "names_rank": isinstance(error, PeerError),
        "where": "" if account is None or isinstance(error, PeerError) else account.where,
        "account": "" if account is None else str(account),
        "reports": dict(error.reports) if isinstance(error, PeerError) else {},
    }
    theirs = {"py_callstack": _traceback(error) or _brief(error), "timestamp": str(int(now))}
    message = {"message": _brief(error), "extraInfo": theirs, "penstock": ours}
    Path(path).write_text(json.dumps({"message": message}), encoding="utf-8")


def told_to_end(error_file: str) -> Path:
    """The file that says that a rank was told to end: what goes wrong in it from then on is no cause."""
    return Path(error_file).with_name(_ENDING_FILE)


def report(failures: Mapping[int, Any]) -> int:
    """Print the summary of torchrun's `ProcessFailure`s by rank; the first cause's exit code."""
    told = {rank: _told(failure) for rank, failure in failures.items()}
    last = _last(told)
    causes = [_cause(rank, failure, told[rank], last.get(rank)) for rank, failure in failures.items()]
    noticed = min(cause.time for cause in causes)
    first = min(_unless_late(cause, noticed) for cause in causes)
    lines = [f"penstock: error: {first}"]
    if last:
        ranks = sorted({*failures, *last})
        lines.append("What the ranks did last:")
        lines += [f"  rank {rank} {last[rank].text if rank in last else 'told nothing'}" for rank in ranks]
    print("\n".join([*lines, *filter(None, [first.traceback.rstrip()])]), file=sys.stderr, flush=True)
    return first.exit_code


def _told(failure: Any) -> Mapping[str, Any]:
    """What `record` wrote in the rank that failed, if it did."""
    data = failure.error_file_data.get("message", {})
    told: Mapping[str, Any] = data.get("penstock", {}) if isinstance(data, dict) else {}
    return told


def _last(told: Mapping[int, Mapping[str, Any]]) -> dict[int, Last]:
    """By rank: its own word before that of others, the later one of several."""
    found: dict[int, Last] = {}
    for rank, words in told.items():
        if words.get("account"):
            found[rank] = Last(True, words["time"], words["account"])
        for other, text in words.get("reports", {}).items():
            heard = Last(False, words["time"], text)
            found[int(other)] = max(heard, found.get(int(other), heard))
    return found


def _cause(rank: int, failure: Any, told: Mapping[str, Any], last: Last | None) -> Cause:
    """In order: a rank killed from outside, an error of its own, an end without a word, a lost peer.

    SIGTERM is how the launcher ends the others, and SIGABRT how libraries end when a peer goes away.
    """
    code, heard = failure.exitcode, "" if last is None else last.text
    if told:
        order = 4 if told["secondary"] else 1
        message = told["message"] if told["names_rank"] else f"rank {rank}: {told['message']}"
        code = max(code, 1)
        return Cause(order, told["time"], rank, message, told["where"], told["traceback"], code)
    if code in _ENDED:
        return Cause(5, failure.timestamp, rank, f"rank {rank} was ended", "", "", 128 + signal.SIGTERM)
    if code < 0:
        number = signal.Signals(-code)
        order = 2 if number == signal.SIGABRT else 0
        message = f"rank {rank} was killed by signal {-code} ({number.name})"
        return Cause(order, failure.timestamp, rank, message, heard, "", 128 - code)
    return Cause(2, failure.timestamp, rank, f"rank {rank} ended with exit code {code}", heard, "", code)


def _unless_late(cause: Cause, noticed: float) -> Cause:
    """A rank that was killed well after the first failure was a straggler, and we killed it."""
    late = cause.order == 0 and cause.time > noticed + GRACE_SECONDS / 2
    return cause._replace(order=5) if late else cause


def _brief(error: BaseException) -> str:
    """Without what the ranks did last, but for the one to blame."""
    if isinstance(error, PeerError):
        return "\n  ".join(filter(None, (error.brief, error.peer_report)))
    return str(error) if isinstance(error, PenstockError) else f"{type(error).__name__}: {error}"


def _traceback(error: BaseException) -> str:
    return "" if isinstance(error, PenstockError) else "".join(traceback.format_exception(error))
