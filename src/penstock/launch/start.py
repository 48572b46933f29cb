"""Start every rank on this machine with torchrun's launcher, and report the first cause of a failure.

    launch             starts the ranks, waits, and prints one summary of their failures (failures.py)
    follow_parent      in a rank: end when the launcher is gone, or ends this rank
    fail               in a rank: leave the error where the launcher looks for it, and end at once

torchrun's own report lists every failed rank in the order in which it noticed them. Usually one rank has a
reason and the others only lost their peer.
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
from typing import Any, NamedTuple, NoReturn

from penstock.launch import failures

LAUNCHER = "PENSTOCK_LAUNCHER"  # process id of the `launch` that started this rank
_LAST_SECONDS = 2  # from the signal to end to a rank's end; within failures.GRACE_SECONDS


def under_torchrun() -> bool:
    """Whether torchrun, or `launch`, started this process as one of several ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


class Ended(NamedTuple):
    """How ranks ended. cause: the first failure, in words; empty where none failed, or a signal ended all"""

    code: int
    cause: str = ""


def launch(ranks: int, command: list[str]) -> int:
    """Run `ranks` copies of `command` on this machine under torchrun's launcher.

    The ranks' output passes through. As soon as one rank fails all are ended, and the first cause is printed
    once on stderr. Ctrl-C and SIGTERM are passed on to the ranks. Call it from the main thread, as it handles
    signals.

    Returns: the exit code: that of the first cause, 130 after Ctrl-C, 143 after SIGTERM.
    """
    return attempt(ranks, command).code


def attempt(ranks: int, command: list[str]) -> Ended:
    """The same, with the first cause."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    logs = tempfile.TemporaryDirectory(prefix="penstock-")
    with logs, _surroundings(), _end_stragglers(Path(logs.name)):
        try:
            elastic_launch(_launch_config(ranks, logs.name), command[0])(*command[1:])
        except ChildFailedError as failed:
            return Ended(*failures.report(failed.failures))
        except (SignalException, KeyboardInterrupt) as stopped:
            number = getattr(stopped, "sigval", signal.SIGINT)
            interrupted = number == signal.SIGINT
            print(f"penstock: {'interrupted' if interrupted else 'ended by ' + number.name}", file=sys.stderr)
            return Ended(failures.INTERRUPTED if interrupted else 128 + number)
    return Ended(0)


def relaunch(ranks: int) -> None:
    """Run the calling script in `ranks` processes.

    In the parent it never returns: it exits with the ranks' code. In a rank it returns at once, and from then
    on an exception that the script does not catch ends the rank instead of leaving it to wait for its peers.
    """
    if under_torchrun():
        follow_parent()
        sys.excepthook = lambda _, error, __: fail(error)
        return
    sys.exit(launch(ranks, [sys.executable, *sys.orig_argv[1:]]))


def follow_parent() -> None:
    """In a rank: end when `launch` is gone, so that no rank is left behind.

    When another rank has failed, the launcher sends SIGTERM, as torchrun does. This rank then has two seconds
    to notice the failure itself and to report what it did last. Call it from the main thread, as it handles a
    signal.
    """
    parent, file = int(os.environ.get(LAUNCHER, 0)), os.environ.get(failures.ERROR_FILE)
    if not under_torchrun() or not file:
        return
    signals = _signals_to_pipe()

    def follow() -> None:
        while parent in (0, os.getppid()):
            readable, _, _ = select.select([signals], [], [], 0.5)
            if readable and signal.SIGTERM in os.read(signals, 64):
                since = time.time()
                failures.ending_file(file).touch()
                time.sleep(_LAST_SECONDS)
                failures.record_end(since)
                break
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=follow, name="follow-parent", daemon=True).start()


def _signals_to_pipe() -> int:
    """The reading end of a pipe that receives the numbers of signals; SIGTERM does nothing else from now on.

    A Python handler would not run while the main thread waits for another rank in foreign code.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    before = signal.signal(signal.SIGTERM, lambda *_: None)

    def restore() -> None:  # SIGTERM itself ends a forked child, such as one that loads data
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, before)

    os.register_at_fork(after_in_child=restore)
    return reading


def fail(error: BaseException, *, quiet: bool = False) -> NoReturn:
    """End this rank at once with the exit code of `error`, and record it for the launcher.

    Under `launch`, or with `quiet`, nothing is printed here, as another process prints it. Python's shutdown
    is left out, as it would wait for the peers of a process group.
    """
    code = failures.exit_code(error)
    failures.record(error)
    if not quiet and LAUNCHER not in os.environ and code != failures.INTERRUPTED:
        print(failures.describe(error, int(os.environ.get("RANK", 0))), file=sys.stderr)
    leave(code)


def leave(code: int) -> NoReturn:
    """End this process at once, with its output flushed."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


# ---- What surrounds the launcher


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
def _surroundings() -> Iterator[None]:
    """Set the ranks' environment and silence the launcher's loggers; afterwards restore everything.

    Ranks get one thread each unless the user says otherwise. The launcher's loggers have levels of their own,
    and its report of a failure would hide the cause. It replaces signal handlers and does not restore them.
    """
    environment, logging_off = dict(os.environ), logging.root.manager.disable
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    handlers = {number: signal.getsignal(number) for number in numbers}
    os.environ[LAUNCHER] = str(os.getpid())
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # penstock.parallel.nccl says why
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging_off)
        os.environ.clear()
        os.environ.update(environment)
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextmanager
def _end_stragglers(logs: Path) -> Iterator[None]:
    """Kill the ranks that are left some time after a failure: a stopped process ignores SIGTERM.

    The launcher itself would wait for half a minute. A rank is known by its environment, as it may have been
    stopped before it did anything.
    """
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.2):
            if any(logs.rglob("error.json")) and not over.wait(failures.GRACE_SECONDS):
                for environment in Path("/proc").glob("[0-9]*/environ"):
                    with suppress(OSError):
                        if f"{failures.ERROR_FILE}={logs}/".encode() in environment.read_bytes():
                            os.killpg(int(environment.parent.name), signal.SIGKILL)
                return

    watcher = threading.Thread(target=watch, name="end-stragglers", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
