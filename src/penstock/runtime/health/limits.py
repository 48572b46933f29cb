"""Time limits for calls that may never return, and which of torch's errors are about another rank.

torch's client of the key-value store waits for answers without a limit. Where the store's machine cannot be
reached, or its process is stopped, a call keeps its thread in the kernel for minutes, or for ever.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from queue import SimpleQueue
from typing import TypeVar

from torch.distributed import DistError

T = TypeVar("T")

ANSWERS = 3.0  # seconds in which a store answers

# texts in the errors of gloo, the store and shared memory; NCCL has two forms
_LATE = re.compile(r"timed out|timing out|operation timeout|wait timeout", re.IGNORECASE)
# gloo's errors have no type of their own, only their text
_OF_GLOO = re.compile(
    r"gloo|connection (closed|reset)|timed out (waiting|after)|operation timed out", re.IGNORECASE
)


def is_late(cause: BaseException) -> bool:
    """Whether a wait failed because it took too long, by the text of its error."""
    return _LATE.search(str(cause)) is not None


def is_of_peer(cause: BaseException) -> bool:
    """Whether an error of torch says that another rank is gone or late."""
    return isinstance(cause, DistError) or _OF_GLOO.search(str(cause)) is not None


def in_a_thread(run: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=run, name="penstock-call", daemon=True)
    thread.start()
    return thread


class CallThread:
    """A thread that makes one call after the other. None of them may raise."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, call: Callable[[], None]) -> None:
        """Make this call after those before it."""
        self._calls.put(call)

    def close(self, seconds: float) -> None:
        """End after the calls so far. Waits for that up to `seconds`."""
        self._calls.put(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


def begun(
    what: str,
    call: Callable[[], T],
    start: Callable[[Callable[[], None]], threading.Thread | None] = in_a_thread,
) -> Callable[[timedelta], T]:
    """Begin `call` in another thread. Returns a function that waits for the result, up to a time limit.

    It raises RuntimeError where the call takes longer, and may be called again. what: for that error
    """
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:  # raised where the result is waited for
            answer.set_exception(error)

    def wait(limit: timedelta) -> T:
        seconds = limit.total_seconds()
        try:
            result = answer.result(seconds)
        except TimeoutError:
            if answer.done():
                raise
            raise RuntimeError(f"timed out after {seconds:.0f} s: {what}") from None
        if thread is not None:
            thread.join()  # it has nothing left to do
        return result

    thread = start(run)
    return wait


def within(
    seconds: float,
    what: str,
    call: Callable[[], T],
    start: Callable[[Callable[[], None]], threading.Thread | None] = in_a_thread,
) -> T:
    """Return the result of `call`, made in another thread.

    Raises RuntimeError where the call takes longer than `seconds`; its thread is then left running.
    """
    return begun(what, call, start)(timedelta(seconds=seconds))
