"""Why ranks ended: the record of each rank for its launcher, and the one summary of all.

penstock: error: <the first cause>
What the ranks did last:
  rank 0 waiting for 1B0 from rank 1, steady phase; 4 of 12 ops done, the last 0F1 0F2 0F3
  rank 1 ...
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from penstock.errors import InputError, PeerError, PeerLostError, PenstockError, account_of
from penstock.shortages import OUT_OF_MEMORY, shortage

INTERRUPTED = 130  # the code of shells for a command that Ctrl-C ended
# EX_TEMPFAIL of sysexits.h, "try again later": a signal stopped the run, its checkpoint is written, and
# --resume goes on. No signal and no shell gives this code, so schedulers can distinguish it from a failure
STOPPED = 75
GRACE_SECONDS = 3  # from the first failure to the end of ranks that do not end by themselves
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_LOST, _LAST = 4, 5  # see `_cause`


class Cause(NamedTuple):
    """Why one rank failed. The lowest is the first cause: first by `order`, which is its kind, then by time.

    Attributes:
        who: the rank and its host; empty if the message names them
        where: the op and phase of the rank; empty if the message names them or they are unknown
    """

    order: int
    time: float
    rank: int
    who: str
    message: str
    where: str
    traceback: str
    exit_code: int

    def __str__(self) -> str:
        return f"{self.who}{self.message}, {self.where}" if self.where else f"{self.who}{self.message}"


class Failure(NamedTuple):
    """The end of a process whose exit code is not 0.

    Attributes:
        code: its exit code, or minus the number of the signal that killed it
        time: when the launcher noticed it, in seconds of time.time()
        file: its record, which may not exist
        killed: whether the launcher itself killed it
        for_memory: whether the kernel has killed a process of this machine for memory meanwhile
    """

    code: int
    time: float
    file: Path
    killed: bool = False
    for_memory: bool = False


def exit_code(error: BaseException) -> int:
    """The exit code of a process that `error` ends."""
    if isinstance(error, PenstockError):
        return error.exit_code
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1


def describe(error: BaseException, rank: int | None = None) -> str:
    """The text for stderr: one `penstock: error:`, after the traceback of an error that is not typed."""
    error = shortage(error) or error
    where = "" if rank is None or _names_rank(error) else _who(rank, exit_code(error))
    text = str(error) if isinstance(error, PenstockError) else _brief(error)
    return f"{_traceback(error)}penstock: error: {where}{text}"


def _names_rank(error: BaseException) -> bool:
    return isinstance(error, PenstockError) and error.names_rank


def ending_file(error_file: str) -> Path:
    """The file that a rank makes when it gets a signal to end; a later failure of it is no cause."""
    return Path(error_file).with_name("ending")


def asked_file(error_file: str) -> Path:
    """The file that the launcher makes when it passes a signal on to a rank."""
    return Path(error_file).with_name("asked")


def record_end(since: float, signum: int = signal.SIGTERM) -> None:
    """Record that a signal, which came at `since`, ended this rank, unless an error is recorded already."""
    path = Path(os.environ[ERROR_FILE])
    if not path.exists():
        _write(path, _ended_by(signum), "", since, {"ended": since, "signal": signum})


def _ended_by(signum: int) -> str:
    return f"was ended by {signal.Signals(signum).name}"


def _write(path: Path, message: str, stack: str, when: float, ours: Mapping[str, object]) -> None:
    theirs = {"py_callstack": stack or message, "timestamp": str(int(when))}
    record = {"message": {"message": message, "extraInfo": theirs, "penstock": ours}}
    path.write_text(json.dumps(record), encoding="utf-8")


def record_stop(words: str) -> None:
    """Record that this rank has stopped after a signal, and how, in words."""
    if path := os.environ.get(ERROR_FILE):
        _write(Path(path), words, "", time.time(), {"stopped": words})


def record(error: BaseException) -> None:
    """Record `error` for the launcher, or for torchrun: in torchrun's form, with fields of ours."""
    path, now = os.environ.get(ERROR_FILE), time.time()
    if not path:
        return
    account, error = account_of(error), shortage(error) or error
    ours = {
        "time": now,
        "message": _brief(error),
        "traceback": _traceback(error),
        "secondary": isinstance(error, PeerLostError | KeyboardInterrupt) or ending_file(path).exists(),
        "names_rank": _names_rank(error),
        "where": "" if account is None or isinstance(error, PeerError) else account.where,
        "account": "" if account is None else str(account),
        "reports": dict(error.reports) if isinstance(error, PeerError) else {},
    }
    _write(Path(path), _brief(error), _traceback(error), now, ours)


def report(failures: Mapping[int, Failure], asked: int = 0) -> tuple[int, str]:
    """Print why ranks failed, unless all of them stopped after a signal.

    Args:
        failures: of the ranks that did not end with 0; at least one
        asked: the signal that the launcher got to end them; 0 for none

    Returns: the exit code; and in words the first cause, or how the ranks stopped. No words if the signal
    ended them: then each rank was ended, or lost another one that was.
    """
    records = {rank: _recorded(failure) for rank, failure in failures.items()}
    stops = [records[rank].get("stopped") for rank, failure in failures.items() if failure.code == STOPPED]
    if len(stops) == len(failures):
        return STOPPED, next(filter(None, stops), "")
    last = _last_accounts(records)
    causes = [_cause(rank, failures[rank], records[rank], last.get(rank, "")) for rank in failures]
    first = _of_all(min(causes), causes)
    if asked and first.order >= _LOST:
        by = f"ended by {signal.Signals(asked).name}"
        print(f"penstock: {'interrupted' if asked == signal.SIGINT else by}", file=sys.stderr)
        return 128 + asked, ""
    lines = [f"penstock: error: {first}"]
    if last:
        lines.append("What the ranks did last:")
        lines += [f"  rank {rank} {last.get(rank, 'left no report')}" for rank in sorted({*failures, *last})]
    print("\n".join([*lines, *filter(None, [first.traceback.rstrip()])]), file=sys.stderr, flush=True)
    return first.exit_code, str(first)


def _recorded(failure: Failure) -> dict[str, Any]:
    """The record of the rank; empty if it wrote none, or was killed while it did."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        ours = json.loads(failure.file.read_text(encoding="utf-8"))["message"]["penstock"]
        return ours if isinstance(ours, dict) else {}
    return {}


def _last_accounts(records: Mapping[int, Mapping[str, Any]]) -> dict[int, str]:
    """The last account of each rank: its own, else the latest one that another rank had of it."""
    accounts: dict[int, str] = {}
    raised = [written for written in records.values() if "reports" in written]
    for written in sorted(raised, key=lambda written: float(written["time"])):
        accounts |= {int(other): text for other, text in written["reports"].items()}
    return accounts | {
        rank: written["account"] for rank, written in records.items() if written.get("account")
    }


def _cause(rank: int, failure: Failure, written: Mapping[str, Any], last: str) -> Cause:
    """The cause of a rank. order: 0 killed from outside, 1 its own error, 2 ended without a record, 4 lost a
    peer, or ended by SIGTERM.

    The launcher ends the other ranks by SIGTERM after the first has failed. So a rank that got SIGTERM before
    another one lost a peer got it from elsewhere. Libraries end by SIGABRT when a peer goes away.
    """
    code, when = failure.code, failure.time
    here = f"rank {rank} on {socket.gethostname()} "
    if "ended" in written:
        signum = written["signal"]
        return Cause(_LOST, written["ended"], rank, here, _ended_by(signum), last, "", 128 + signum)
    if "stopped" in written:
        return Cause(_LAST, when, rank, here, written["stopped"], "", "", code)
    if written:
        order = _LOST if written["secondary"] else 1
        who = "" if written["names_rank"] else _who(rank, code)
        where, trace = written["where"], written["traceback"]
        return Cause(order, written["time"], rank, who, written["message"], where, trace, max(code, 1))
    signum = -code if code < 0 else code - 128
    if signum in (signal.SIGTERM, signal.SIGUSR1):
        return Cause(_LAST, when, rank, here, _ended_by(signum), last, "", 128 + signum)
    if code < 0:
        order = _LAST if failure.killed else 2 if -code == signal.SIGABRT else 0
        killed = f"was killed by signal {-code} ({signal.Signals(-code).name})"
        if failure.for_memory and -code == signal.SIGKILL:
            killed += OUT_OF_MEMORY
        return Cause(order, when, rank, here, killed, last, "", 128 - code)
    return Cause(2, when, rank, here, f"ended with exit code {code}", last, "", code)


def _of_all(first: Cause, causes: Sequence[Cause]) -> Cause:
    """The first cause; if other ranks raised the same, such as a loss of NaN, with all of their numbers."""
    ranks = sorted(cause.rank for cause in causes if cause.message == first.message)
    if first.order != 1 or not first.who or len(ranks) == 1:
        return first
    who = first.who.replace(f"rank {first.rank}", f"ranks {', '.join(map(str, ranks))}", 1)
    return first._replace(who=who)


def _who(rank: int, code: int) -> str:
    """The text before an error. For a wrong input it names no machine."""
    return f"rank {rank}: " if code == InputError.exit_code else f"rank {rank} on {socket.gethostname()}: "


def _brief(error: BaseException) -> str:
    """The message without the last reports of ranks, except that of the failed one."""
    if isinstance(error, PeerError):
        return "\n  ".join(filter(None, (error.brief, error.peer_report)))
    return str(error) if isinstance(error, PenstockError) else f"{type(error).__name__}: {error}"


def _traceback(error: BaseException) -> str:
    return "" if isinstance(error, PenstockError) else "".join(traceback.format_exception(error))
