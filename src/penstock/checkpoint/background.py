"""Write a checkpoint in a thread that can be waited for and abandoned."""

from __future__ import annotations

import atexit
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.errors import PenstockError, RunError
from penstock.runtime.transport.groups import Processes

Work = Callable[[Processes], None]

_AT_EXIT = 30.0  # seconds for a write to end as Python ends


class BackgroundWrite:
    """Calls `write`, then `follow`, in a thread; the checkpoint exists once `write` has returned."""

    def __init__(self, path: Path, write: Work, follow: Work, processes: Processes) -> None:
        self.path = path
        self._write: Work | None = write
        self._follow, self._written = follow, False
        self._error: BaseException | None = None
        self._dropped = threading.Event()
        self._processes = _Droppable(processes, self._dropped)
        name = f"penstock-checkpoint-{path.name}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        atexit.register(self._end)  # a thread that wakes up while Python ends may abort the process
        self._thread.start()

    def _run(self) -> None:
        assert self._write is not None
        try:
            self._write(self._processes)
            self._write, self._written = None, True
            self._follow(self._processes)
        except BaseException as error:  # raised by whoever waits
            self._error = error
        finally:
            self._write = None  # and with it the copies

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
            "Fix that; the checkpoint before it is still complete",
        ) from self._error

    @property
    def failure(self) -> str | None:
        """The failure so far, in words; None without one."""
        if self._error is None:
            alive = self._thread.is_alive() and not self._written
            return "it was not written: it was given up before it was finished" if alive else None
        why = f"{type(self._error).__name__}: {self._error}"
        return f"it was written, but then {why}" if self._written else f"it was not written: {why}"

    def _end(self) -> None:
        """Called when Python exits before the write has ended."""
        self.join(0 if self._dropped.is_set() else _AT_EXIT)
        self._dropped.set()
        if self._thread.is_alive() or self._error is not None:
            why = "it was not finished" if self._error is None else repr(self._error)
            warnings.warn(f"checkpoint {self.path}: {why}", RuntimeWarning, stacklevel=1)


class _Droppable:
    """Processes whose collectives fail once the write is abandoned."""

    def __init__(self, processes: Processes, dropped: threading.Event) -> None:
        self.index, self.count = processes.index, processes.count
        self._processes, self._dropped = processes, dropped

    def gather(self, value: Any) -> list[Any]:
        if self._dropped.is_set():
            raise RunError("a checkpoint under way", "it was given up", "Go on from the one before")
        return self._processes.gather(value)
