"""Write a checkpoint in a thread that can be waited for and abandoned."""

from __future__ import annotations

import atexit
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

from penstock.errors import PenstockError, RunError
from penstock.runtime.ranks import Ranks

Publish = Callable[[Path, Ranks], None]  # writes the folder, complete or not at all; collective
Then = Callable[[], None]

_AT_EXIT = 30.0  # seconds for a write to end as Python ends


class BackgroundWrite:
    """Calls `publish`, then `then`, in a thread; the checkpoint exists once `publish` has returned."""

    def __init__(self, path: Path, publish: Publish, then: Then | None, processes: Ranks) -> None:
        self.path = path
        self._publish: Publish | None = publish
        self._then, self._written = then, False
        self._error: BaseException | None = None
        self._dropped = threading.Event()
        self._processes = processes.checked(self._check)
        name = f"penstock-checkpoint-{path.name}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        atexit.register(self._end)  # a thread that wakes up while Python ends may abort the process
        self._thread.start()

    def _run(self) -> None:
        assert self._publish is not None
        try:
            self._publish(self.path, self._processes)
            self._publish, self._written = None, True  # which frees the copies
            follow(self.path, self._then, self._processes)
        except BaseException as error:  # raised where somebody waits for the write
            self._error = error
        finally:
            self._publish = None

    def _check(self) -> None:
        """Before each exchange of the processes that write."""
        if self._dropped.is_set():
            raise RunError("a checkpoint under way", "it was abandoned", "Go on from the one before, if any")

    def join(self, timeout: float | None = None) -> None:
        self._thread.join(timeout)
        if not self._thread.is_alive():
            atexit.unregister(self._end)

    def drop(self, linger: float) -> None:
        self._dropped.set()
        self.join(linger)

    def raise_error(self) -> None:
        """Raise the error that the write ended in, if any, as a typed one."""
        if self._error is None:
            return
        if isinstance(self._error, PenstockError):
            raise self._error
        raise RunError(
            f"checkpoint {self.path}",
            f"it could not be written in the background: {type(self._error).__name__}: {self._error}",
            "Fix that; the checkpoint before it, if there is one, is still complete",
        ) from self._error

    @property
    def failed(self) -> bool:
        """Whether it ended in an error; False while it is under way."""
        return self._error is not None

    @property
    def failure(self) -> str | None:
        """The failure so far, in words; None without one."""
        if self._error is None:
            alive = self._thread.is_alive() and not self._written
            return "it was not written: it was abandoned before it was finished" if alive else None
        why = f"{type(self._error).__name__}: {self._error}"
        return f"it was written, but then {why}" if self._written else f"it was not written: {why}"

    def _end(self) -> None:
        """Called if Python exits before the write has ended."""
        self.join(0 if self._dropped.is_set() else _AT_EXIT)
        self._dropped.set()
        if self._thread.is_alive() or self._error is not None:
            why = "it was not finished" if self._error is None else repr(self._error)
            warnings.warn(f"checkpoint {self.path}: {why}", RuntimeWarning, stacklevel=1)


def follow(path: Path, then: Then | None, processes: Ranks) -> None:
    """Call `then` on process 0. Collective."""
    if then is None:
        return

    def call() -> None:
        try:
            if processes.index == 0:
                then()
        except PenstockError:
            raise
        except Exception as error:
            rule = f"it was written, and the call after it failed: {type(error).__name__}: {error}"
            remedy = "Fix that; the checkpoint itself is complete"
            raise RunError(f"checkpoint {path}", rule, remedy) from error

    processes.attempt(f"do what follows checkpoint {path}, which was written", call)
