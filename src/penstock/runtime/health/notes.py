"""Failure notes: what each process does, in torch's key-value store, where others read it after a failure.

    note/<process>    every period: the time, the host, what the process does, the wait that has lasted
    failed, silent    the first process that failed, and the first one that was silent for too long

A process counts as alive while its note changes, as the clocks of other machines may be wrong. Calls to the
store have a time limit of ours, since torch's client has none: where the store's machine cannot be reached,
or its process is stopped, a call keeps its thread in the kernel for minutes, or for ever.

A note also names its process, so that others on its machine can check whether it is still alive.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

from torch.distributed import Store  # type: ignore[attr-defined]

from penstock.runtime.health.limits import ANSWERS, CallThread, within

FailureKind = Literal["failed", "silent"]  # "silent": longer than another rank's timeout
T = TypeVar("T")


class LimitedStore:
    """A connection to the store whose calls take `limit` seconds at most, all in one thread.

    After the first call that fails or is late, the store counts as gone and is not called again.
    """

    def __init__(self, store: Store, limit: float = ANSWERS) -> None:
        self.limit = limit
        # a clone: torch's own calls, as in making a group, keep the connection busy for as long as they wait
        self._store: Store = store.clone()  # type: ignore[attr-defined]
        self.gone = False
        self._thread = CallThread("penstock-store")

    def set(self, key: str, text: str) -> None:
        self._ask(lambda: self._store.set(key, text))

    def set_first(self, key: str, text: str) -> None:
        """Set a key, unless it has a value."""
        self._ask(lambda: self._store.compare_set(key, "", text))

    def get(self, keys: Sequence[str]) -> list[str | None]:
        """The values at `keys`, None for each that has none."""

        def read() -> list[str | None]:
            if len(keys) > 1 and self._store.check([*keys]):
                return [text.decode() for text in self._store.multi_get([*keys])]
            return [self._store.get(key).decode() if self._store.check([key]) else None for key in keys]

        return self._ask(read) or [None] * len(keys)

    def has(self, keys: Sequence[str]) -> bool:
        """Whether all of `keys` have a value."""
        return self._ask(lambda: self._store.check([*keys])) is True

    def _ask(self, call: Callable[[], T]) -> T | None:
        if self.gone:
            return None
        try:
            return within(self.limit, "the store does not answer", call, self._thread.put)
        except RuntimeError:
            self.gone = True
            return None

    def close(self) -> None:
        stuck, self.gone = self.gone, True
        self._thread.close(0 if stuck else self.limit)


class ProcessId(NamedTuple):
    """A process, in a form by which others on its machine can check whether it is alive.

    machine: the boot and the namespace in which `pid` counts; empty where neither is known
    began: start of the process, in ticks since the machine started, as a pid may be used again
    """

    machine: str
    pid: int
    began: int | None


class PeerWait(NamedTuple):
    """A wait of more than a period: for `what`, from the process `peer` (None: from all)."""

    what: str
    peer: int | None


class FailureNote(NamedTuple):
    """A process's report on itself.

    at: seconds of its machine's clock, which began when that machine did; boot: names the machine
    last: whether the process knew of a failure, and may have ended since
    process_id: None once the process has closed its pipeline, and may end
    """

    at: float
    host: str
    boot: str
    account: str
    wait: PeerWait | None = None
    last: bool = False
    process_id: ProcessId | None = None


class FirstFailure(NamedTuple):
    """The first failure of its kind. process: the one that failed; None where it is not known"""

    process: int | None
    host: str
    reason: str


class FailureNotes:
    """The notes of all processes, one each. `process` is this one."""

    def __init__(self, store: LimitedStore, process: int) -> None:
        self._store, self.process = store, process
        self.host, self._boot = socket.gethostname(), boot_id()
        self.process_id: ProcessId | None = this_process()

    def leave(self, account: str, wait: PeerWait | None, last: bool = False) -> None:
        """Replace this process's note."""
        note = FailureNote(time.monotonic(), self.host, self._boot, account, wait, last, self.process_id)
        self._store.set(f"note/{self.process}", json.dumps(note))

    def read(self, processes: Iterable[int]) -> dict[int, FailureNote]:
        """The notes of those processes that have left one."""
        asked = [*processes]
        texts = zip(asked, self._store.get([f"note/{process}" for process in asked]), strict=True)
        notes = {process: FailureNote(*json.loads(text)) for process, text in texts if text is not None}
        return {
            process: note._replace(
                wait=note.wait and PeerWait(*note.wait),
                process_id=note.process_id and ProcessId(*note.process_id),
            )
            for process, note in notes.items()
        }

    def absent(self, processes: Sequence[int], seconds: float) -> list[int]:
        """Wait for the first note of each process. Returns those that have left none after that time."""
        names, pause = [f"note/{process}" for process in processes], 0.001
        until = time.monotonic() + seconds
        while not self._store.has(names):  # the store's own wait prints a warning and blocks other calls
            if self._store.gone or time.monotonic() >= until:
                come = self.read(processes)
                return [process for process in processes if process not in come]
            time.sleep(pause)
            pause = min(2 * pause, 0.5)
        return []

    def fail(self, failure: FirstFailure, end: FailureKind = "failed") -> None:
        """Record a failure; the first record of each kind stays."""
        self._store.set_first(end, json.dumps(failure))

    def first_failure(self, *ends: FailureKind, patience: float = 0.0) -> FirstFailure | None:
        """The first failure of one of these kinds. Waits up to `patience` seconds for one."""
        until = time.monotonic() + patience
        while (text := next(filter(None, self._store.get(ends)), None)) is None:
            if self._store.gone or time.monotonic() >= until:
                return None
            time.sleep(0.05)
        return FirstFailure(*json.loads(text))


class Pulse:
    """When each process's note last changed, by this process's own clock."""

    def __init__(self, notes: FailureNotes, processes: Iterable[int]) -> None:
        self._notes, self._processes = notes, [*processes]
        self._seen: dict[int, FailureNote] = {}
        self._changed: dict[int, float] = {}

    def look(self) -> None:
        notes, now = self._notes.read(self._processes), time.monotonic()
        for process in self._processes:
            note, seen = notes.get(process), self._seen.get(process)
            if process not in self._changed or (note is not None and note != seen):
                self._changed[process] = now
            if note is not None:
                self._seen[process] = note

    def note(self, process: int) -> FailureNote | None:
        return self._seen.get(process)

    def still(self, process: int) -> float:
        """Seconds since the note was last seen to change."""
        return time.monotonic() - self._changed.get(process, time.monotonic())

    def report(self, process: int) -> str | None:
        """The last note in words."""
        note = self.note(process)
        if note is None:
            return None
        here = note.boot == boot_id()  # the same machine: its processes share its clock
        ago = time.monotonic() - note.at if here else self.still(process)
        return f"last reported {'' if here else 'at least '}{ago:.1f} s ago: {note.account}"


@functools.cache
def boot_id() -> str:
    """Names this boot of this machine."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return f"{os.uname().nodename}"


# ---- Whether a process lives


def this_process() -> ProcessId:
    return ProcessId(machine(), os.getpid(), began(os.getpid()))


def lives(process: ProcessId) -> bool | None:
    """Whether `process` is alive; a zombie is not. None where this process cannot see that."""
    if not process.machine or process.machine != machine() or not is_visible(process.pid):
        return None
    return began(process.pid) == process.began


def machine() -> str:
    """Names the boot and the namespace in which a pid counts; empty where neither is known."""
    return _machine_of(os.getpid())


@functools.cache  # called for each process in each period; a fork may be in another namespace
def _machine_of(pid: int) -> str:
    with suppress(OSError):
        return f"{boot_id()} {os.readlink('/proc/self/ns/pid')}"
    return ""


def began(pid: int) -> int | None:
    """When a process began, in ticks since the machine started; None for one that is gone or has ended."""
    with suppress(OSError, ValueError, IndexError):
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        fields = text.rpartition(")")[2].split()
        return None if fields[0] in ("Z", "X") else int(fields[19])
    return None


def is_visible(pid: int) -> bool:
    """Whether /proc would show that process: it may hide those of other users."""
    if began(pid) is not None:
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        return False
    return True
