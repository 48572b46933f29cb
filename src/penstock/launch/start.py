"""Start every rank through torchrun's launcher, and say why the first one failed.

The launcher itself reports every rank that fails, in a table, in the order that it noticed them. Usually one
rank has a reason and the others only lost their peer, so ranks write their error where the launcher looks for
it, and `launch` shows one summary (failures.py): the first cause, and what each rank did last.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from penstock.launch import failures
from penstock.launch.failures import describe, exit_code

__all__ = [
    "LAUNCHER",
    "describe",
    "exit_code",
    "fail",
    "follow_parent",
    "launch",
    "leave",
    "relaunch",
    "under_torchrun",
]

LAUNCHER = "PENSTOCK_LAUNCHER"  # process id of the `launch` that started this rank
_PROCESS_FILE = "process"  # beside the error file: the rank's process id
_LAST_WORDS_SECONDS = 2  # of the grace, from being told to end to a rank's end


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
            return failures.report(failed.failures)
        except (SignalException, KeyboardInterrupt) as stopped:
            number = getattr(stopped, "sigval", signal.SIGINT)
            interrupted = number == signal.SIGINT
            print(f"penstock: {'interrupted' if interrupted else 'ended by ' + number.name}", file=sys.stderr)
            return failures.INTERRUPTED if interrupted else 128 + number
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
    """In a rank that `launch` started: end when the launcher is gone, so that none is left behind.

    When another rank has failed the launcher tells this one to end, by SIGTERM. It then has a while to notice
    by itself, and to tell what it did last. Call it from the main thread: it minds a signal.
    """
    parent = int(os.environ.get(LAUNCHER, 0))
    if not parent or not under_torchrun():
        return
    file = os.environ.get(failures.ERROR_FILE)
    if file:
        Path(file).with_name(_PROCESS_FILE).write_text(str(os.getpid()))
    signals = _signals_to_pipe()

    def follow() -> None:
        while os.getppid() == parent:
            readable, _, _ = select.select([signals], [], [], 0.5)
            if readable and signal.SIGTERM in os.read(signals, 64):
                if file:
                    failures.told_to_end(file).touch()
                time.sleep(_LAST_WORDS_SECONDS)
                break
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=follow, name="follow-parent", daemon=True).start()


def _signals_to_pipe() -> int:
    """The end of a pipe from which the numbers of signals may be read; SIGTERM does nothing else from now on.

    A handler of Python's own would not run while the main thread waits for another rank in foreign code.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    before = signal.signal(signal.SIGTERM, lambda *_: None)

    def restore() -> None:  # in a child, such as one that loads data, which is ended by SIGTERM itself
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, before)

    os.register_at_fork(after_in_child=restore)
    return reading


def fail(error: BaseException, *, quiet: bool = False) -> NoReturn:
    """End this rank at once with the exit code of `error`, having recorded it for the launcher.

    Under `launch`, or where `quiet`, nothing is printed here: another does, once. Exits without the
    interpreter's own shutdown, which would wait for the peers of a process group.
    """
    code = exit_code(error)
    failures.record(error)
    if not quiet and LAUNCHER not in os.environ and code != failures.INTERRUPTED:
        print(describe(error, int(os.environ.get("RANK", 0))), file=sys.stderr)
    leave(code)


def leave(code: int) -> NoReturn:
    """End this process at once, with its output flushed."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _fail_with(_: type[BaseException], error: BaseException, __: TracebackType | None) -> None:
    fail(error)


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
        shutdown_timeout=failures.GRACE_SECONDS,
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
            if any(logs.rglob("error.json")) and not over.wait(failures.GRACE_SECONDS):
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
