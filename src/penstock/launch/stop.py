"""The signals that a process of a run gets, and how it ends.

                         while it trains                                     else
    SIGTERM, SIGUSR1     all ranks save after their step, and end: `Stop`    it ends after two seconds
    SIGINT (Ctrl-C)      the same                                            KeyboardInterrupt
    a second signal      it ends at once
    another rank failed  it ends after two seconds, in which it may notice and report the failure itself
    its launcher ended   it ends

A thread reads the signals: Python's own handlers do not run while the main thread waits in C code.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType
from typing import NoReturn, Self

from penstock.errors import PenstockError, RunError
from penstock.launch import failures

LAUNCHER = "PENSTOCK_LAUNCHER"  # process id of the `launch` that started this rank
PASSED_ON = 256  # added to the number of a signal that the launcher got; larger than any number
_LAST_SECONDS = 2  # from the signal to end to a rank's end; within failures.GRACE_SECONDS
_LOOKS = 0.5  # seconds between two checks of clock and parent
_SAME = 1.0  # seconds in which two signals count as one: from a scheduler and from the launcher
_ASKING = (signal.SIGTERM, signal.SIGUSR1)


def under_torchrun() -> bool:
    """Whether torchrun, or `launch`, started this process as one of several ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def handle(signals: Sequence[int], handler: Callable[[int, FrameType | None], object]) -> Callable[[], None]:
    """Handle these signals, and return a function that restores the handlers before.

    Call both in the main thread.
    """
    before = {signum: signal.signal(signum, handler) for signum in signals}

    def restore() -> None:
        for signum, earlier in before.items():
            signal.signal(signum, earlier)

    return restore


def _ignored(signum: int, frame: FrameType | None) -> None:
    """A handler of a signal that the thread reads."""


class Stop:
    """The signals that this process gets. A context manager in the main thread, which handles them meanwhile.

    Args:
        launcher: process id of the parent; this process then ends with it

    Attributes:
        number: of the signal after which this process must save and end, and PASSED_ON more if the launcher
            got it; 0 before any signal
    """

    def __init__(self, launcher: int | None = None) -> None:
        self.number = 0
        self._launcher = launcher
        self._came = 0.0
        self._seconds: float | None = None  # for the process to save; None while it has nothing to save
        self._late: PenstockError | None = None
        self._handlers = ExitStack()
        self._listening = False
        self._reads_no_more, self._ending = threading.Event(), False

    def __enter__(self) -> Self:
        self._signals, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        wakeup = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        self._handlers.callback(signal.set_wakeup_fd, wakeup)
        self._handlers.callback(handle(_ASKING, _ignored))
        self._listening = True
        os.register_at_fork(after_in_child=self._restore)  # a signal must end a child, such as a data loader
        self._thread = threading.Thread(target=self._listen, name="penstock-signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """The thread may be about to end this process: it does so unless an error ends it before."""
        self._restore()
        os.write(self._writing, b"\0")
        self._reads_no_more.wait()
        if not self._ending:
            self._thread.join()
        os.close(self._writing)
        os.close(self._signals)

    def _restore(self) -> None:
        self._listening = False
        self._handlers.close()

    @contextmanager
    def saves(self, seconds: float, late: PenstockError) -> Iterator[None]:
        """In the block a signal sets `number`, and the process must save and end within `seconds`.

        late: the error that ends a process that does not
        """
        if not self._listening:
            yield
            return
        self._seconds, self._late = seconds, late
        restore = handle([signal.SIGINT], _ignored)
        try:
            yield
        finally:
            self._seconds = None
            restore()

    # ---- the thread

    def _listen(self) -> None:
        waiting = select.poll()  # select.select refuses a file's number above 1,023
        waiting.register(self._signals, select.POLLIN)
        while True:
            readable = waiting.poll(1000 * _LOOKS)
            for signum in os.read(self._signals, 64) if readable else b"":
                if not signum:
                    return self._reads_no_more.set()
                self._take(signum)
            if self._launcher not in (None, os.getppid()):
                fail(_alone(self._launcher))
            late, seconds = self._late, self._seconds
            if self.number and late and seconds is not None and time.monotonic() - self._came > seconds:
                fail(late)

    def _take(self, signum: int) -> None:
        file = os.environ.get(failures.ERROR_FILE)
        if self._seconds is None or (file and failures.ending_file(file).exists()):
            if signum in _ASKING:  # SIGINT raises KeyboardInterrupt
                self._ending = True
                self._reads_no_more.set()
                _end_soon(signum)
        elif signum not in (*_ASKING, signal.SIGINT):
            pass
        elif not self.number:
            passed_on = file and failures.asked_file(file).exists()
            self._came, self.number = time.monotonic(), signum + (PASSED_ON if passed_on else 0)
            if LAUNCHER not in os.environ and os.environ.get("LOCAL_RANK", "0") == "0":
                print(said(signum), file=sys.stderr, flush=True)
        elif time.monotonic() - self._came > _SAME:
            leave(128 + signum)


def _alone(launcher: int | None) -> RunError:
    return RunError(f"process {launcher}, the launcher of this rank", "it has ended", "See why it did")


def said(signum: int) -> str:
    """The line that a process prints when it gets a signal to save and to end."""
    name = signal.Signals(signum).name
    return f"penstock: {name}: a checkpoint after this step, then the end; a second signal ends at once"


def _end_soon(signum: int) -> None:
    """End after two seconds, unless the main thread ends the process before, with an error of its own."""
    since, file = time.time(), os.environ.get(failures.ERROR_FILE)
    if file:
        failures.ending_file(file).touch()
    if under_torchrun():
        time.sleep(_LAST_SECONDS)
    if file:
        failures.record_end(since, signum)
    os._exit(128 + signum)


def follow_parent() -> None:
    """In a rank: listen to signals from now on. Call it from the main thread, as it handles signals.

    When another rank has failed, the launcher sends SIGTERM, as torchrun does. This rank then has two seconds
    to notice the failure itself and to report its last ops. When the launcher is gone the rank ends.
    """
    if under_torchrun():
        Stop(os.getppid()).__enter__()


def fail(error: BaseException, *, quiet: bool = False) -> NoReturn:
    """End this rank at once with the exit code of `error`, and record it for the launcher.

    Under `launch`, or with `quiet`, it prints nothing, as another process prints the error. Python's shutdown
    is skipped, as it would wait for the peers of a process group.
    """
    code = failures.exit_code(error)
    failures.record(error)
    if not quiet and LAUNCHER not in os.environ and code != failures.INTERRUPTED:
        print(failures.describe(error, int(os.environ.get("RANK", 0))), file=sys.stderr)
    leave(code)


def leave(code: int) -> NoReturn:
    """End this process at once, with its output flushed, as far as it can be written."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # a full disk; closed; None where Python had none
            stream.flush()
    os._exit(code)
