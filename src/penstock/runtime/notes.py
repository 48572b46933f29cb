"""What the ranks of a pipeline leave for each other in torch's key-value store, one note a rank.

A rank that fails to reach the store goes on without: the store goes down with the process that holds it.
"""

from __future__ import annotations

import json
import time
from typing import Literal, NamedTuple

from torch.distributed import Store  # type: ignore[attr-defined]

End = Literal["failed", "silent"]  # "silent": past another rank's timeout


class Wait(NamedTuple):
    """A wait that has lasted: for `what`, from rank `peer` (None: from all)."""

    what: str
    peer: int | None


class Note(NamedTuple):
    """What a rank tells of itself.

    at: by its wall clock, on which the ranks' machines are trusted to agree
    """

    at: float
    account: str
    wait: Wait | None

    @property
    def age(self) -> float:
        return max(0.0, time.time() - self.at)

    def __str__(self) -> str:
        return f"last reported {self.age:.1f} s ago: {self.account}"


class Notes:
    """The notes of `rank` and of the others in `store`."""

    def __init__(self, store: Store, rank: int) -> None:
        self._store, self._rank = store, rank

    def leave(self, account: str, wait: Wait | None) -> bool:
        """Put this rank's note in the place of its last one; whether it could be."""
        try:
            self._store.set(f"note/{self._rank}", json.dumps((time.time(), account, wait)))
        except RuntimeError:
            return False
        return True

    def read(self, rank: int) -> Note | None:
        text = self._read(f"note/{rank}")
        if text is None:
            return None
        at, account, wait = json.loads(text)
        return Note(at, account, Wait(*wait) if wait else None)

    def fail(self, rank: int, reason: str, end: End = "failed") -> None:
        """Leave word that `rank` came to such an end; the first word of each kind stays."""
        try:
            self._store.compare_set(end, "", json.dumps((rank, reason)))
        except RuntimeError:
            return

    def first_failure(self, *ends: End, patience: float = 0.0) -> tuple[int, str] | None:
        """Which rank came to such an end first, and why; waits for it to be told for `patience` seconds."""
        until = time.monotonic() + patience
        while (text := next(filter(None, map(self._read, ends)), None)) is None:
            if time.monotonic() >= until:
                return None
            time.sleep(0.05)
        rank, reason = json.loads(text)
        return rank, reason

    def _read(self, key: str) -> str | None:
        try:
            return self._store.get(key).decode() if self._store.check([key]) else None
        except RuntimeError:
            return None
