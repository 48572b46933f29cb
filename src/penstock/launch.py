"""Start every rank through torchrun's launcher, and say why the first one failed.

The launcher itself reports every rank that fails, in a table, in the order that it noticed them. Usually one
rank has a reason and the others only lost their peer, so ranks write their error where the launcher looks for
it, and `launch` shows the first cause, once.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, NoReturn

from penstock.errors import PeerLostError, PenstockError

LAUNCHER = "PENSTOCK_LAUNCHER"  # process id of the `launch` that started this rank
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_PROCESS_FILE = "process"  # beside the error file: the rank's process id
_GRACE_SECONDS = 3
_INTERRUPTED = 130  # what shells give a command that Ctrl-C ended


class Cause(NamedTuple):
    """Why one rank failed. The lowest cause is the first one: `order` is its kind, then comes the time."""

    order: int
    time: float
    rank: int
    message: str
    traceback: str
    exit_code: int


def under_torchrun() -> bool:
    """Whether this process is one rank among those that torchrun, or `launch`, started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch(ranks: int, command: list[str]) -> int:
    """Run `ranks` copies of `command` on this machine under torchrun's launcher; the exit code.

    The ranks' output passes through. As soon as one fails all are ended, the first cause is printed once on
    stderr, and its exit code returned. Ctrl-C and SIGTERM are passed on to the ranks, and give 130 and 143.
    Call it from the main thread: it minds the signals.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    with (
        tempfile.TemporaryDirectory(prefix="penstock-") as logs,
        _quiet(),
        _environment(),
        _signals(),
        _end_stragglers(Path(logs)),
    ):
        try:
            elastic_launch(_launch_config(ranks, logs), command[0])(*command[1:])
        except ChildFailedError as failed:
            return _report(failed.failures)
        except (SignalException, KeyboardInterrupt) as stopped:
            number = getattr(stopped, "sigval", signal.SIGINT)
            interrupted = number == signal.SIGINT
            print(f"penstock: {'interrupted' if interrupted else 'ended by ' + number.name}", file=sys.stderr)
            return _INTERRUPTED if interrupted else 128 + number
    return 0


def relaunch(ranks: int) -> None:
    """For a script of one's own: unless it is a rank already, run it in `ranks` processes and exit.

    In the parent this never returns: it exits with the ranks' code. In a rank it returns at once, and from
    then on an error that the script lets through ends the rank instead of leaving it to wait for its peers.
    """
    if under_torchrun():
        follow_parent()
        sys.excepthook = _fail_with
        return
    sys.exit(launch(ranks, [sys.executable, *sys.orig_argv[1:]]))


def follow_parent() -> None:
    """In a rank that `launch` started: end when the launcher is gone, so that none is left behind."""
    parent = int(os.environ.get(LAUNCHER, 0))
    if not parent or not under_torchrun():
        return
    if file := os.environ.get(_ERROR_FILE):
        Path(file).with_name(_PROCESS_FILE).write_text(str(os.getpid()))

    def follow() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=follow, name="follow-parent", daemon=True).start()


def fail(error: BaseException, *, quiet: bool = False) -> NoReturn:
    """End this rank at once with the exit code of `error`, having recorded it for the launcher.

    Under `launch`, or where `quiet`, nothing is printed here: another does, once. Exits without the
    interpreter's own shutdown, which would wait for the peers of a process group.
    """
    code = exit_code(error)
    _record(error)
    if not quiet and LAUNCHER not in os.environ and code != _INTERRUPTED:
        print(describe(error, int(os.environ.get("RANK", 0))), file=sys.stderr)
    leave(code)


def leave(code: int) -> NoReturn:
    """End this process at once, with its output flushed."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def exit_code(error: BaseException) -> int:
    if isinstance(error, PenstockError):
        return error.exit_code
    return _INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1


def describe(error: BaseException, rank: int | None = None) -> str:
    """The text for stderr: one `penstock: error:`, after the traceback where the error is not a typed one."""
    where = "" if rank is None else f"rank {rank}: "
    return f"{_traceback(error)}penstock: error: {where}{_message(error)}"


def _fail_with(_: type[BaseException], error: BaseException, __: TracebackType | None) -> None:
    fail(error)


def _message(error: BaseException) -> str:
    return str(error) if isinstance(error, PenstockError) else f"{type(error).__name__}: {error}"


def _traceback(error: BaseException) -> str:
    return "" if isinstance(error, PenstockError) else "".join(traceback.format_exception(error))


def _record(error: BaseException) -> None:
    """Write `error` where torchrun's launcher reads it, in its own form and with fields of ours."""
    path, now = os.environ.get(_ERROR_FILE), time.time()
    if not path:
        return
    ours = {
        "time": now,
        "message": _message(error),
        "traceback": _traceback(error),
        "secondary": isinstance(error, PeerLostError | KeyboardInterrupt),
    }
    theirs = {"py_callstack": _traceback(error) or _message(error), "timestamp": str(int(now))}
    message = {"message": _message(error), "extraInfo": theirs, "penstock": ours}
    Path(path).write_text(json.dumps({"message": message}), encoding="utf-8")


def _report(failures: Mapping[int, Any]) -> int:
    """Print the first cause among torchrun's `ProcessFailure`s by rank; its exit code."""
    causes = [_cause(rank, failure) for rank, failure in failures.items()]
    noticed = min(cause.time for cause in causes)
    first = min(_unless_late(cause, noticed) for cause in causes)
    print(f"{first.traceback}penstock: error: {first.message}", file=sys.stderr, flush=True)
    return first.exit_code


def _cause(rank: int, failure: Any) -> Cause:
    """In order: a rank killed from outside, an error of its own, an end without a word, a lost peer.

    SIGTERM is how the launcher ends the others, and SIGABRT how libraries end when a peer goes away.
    """
    code = failure.exitcode
    data = failure.error_file_data.get("message", {})
    told = data.get("penstock") if isinstance(data, dict) else None
    if told is not None:
        order = 4 if told["secondary"] else 1
        return Cause(
            order,
            told["time"],
            rank,
            f"rank {rank}: {told['message']}",
            told["traceback"],
            code if code > 0 else 1,
        )
    if code < 0:
        number = signal.Signals(-code)
        order = {signal.SIGABRT: 2, signal.SIGTERM: 5}.get(number, 0)
        message = f"rank {rank} was killed by signal {-code} ({number.name})"
        return Cause(order, failure.timestamp, rank, message, "", 128 - code)
    return Cause(2, failure.timestamp, rank, f"rank {rank} ended with exit code {code}", "", code)


def _unless_late(cause: Cause, noticed: float) -> Cause:
    """A rank that was killed well after the first failure was a straggler, and we killed it."""
    late = cause.order == 0 and cause.time > noticed + _GRACE_SECONDS / 2
    return cause._replace(order=5) if late else cause


def _launch_config(ranks: int, logs: str) -> Any:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",  # 0: any free port
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
        shutdown_timeout=_GRACE_SECONDS,
        logs_specs=DefaultLogsSpecs(log_dir=logs),
    )


@contextmanager
def _environment() -> Iterator[None]:
    """What ranks inherit: who started them, and one thread each unless the user says otherwise."""
    before = dict(os.environ)
    os.environ[LAUNCHER] = str(os.getpid())
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _end_stragglers(logs: Path) -> Iterator[None]:
    """Kill what is left a while after a rank told of its failure: a stopped process heeds no SIGTERM.

    The launcher itself would wait half a minute.
    """
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.2):
            if any(logs.rglob("error.json")) and not over.wait(_GRACE_SECONDS):
                for file in logs.rglob(_PROCESS_FILE):
                    with suppress(ProcessLookupError, ValueError):
                        os.killpg(int(file.read_text()), signal.SIGKILL)
                return

    watcher = threading.Thread(target=watch, name="end-stragglers", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


@contextmanager
def _quiet() -> Iterator[None]:
    """The launcher's own account of a failure would drown the cause; its loggers have levels of their own."""
    logging_off = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging_off)


@contextmanager
def _signals() -> Iterator[None]:
    """The launcher takes the signals over and does not give them back."""
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
