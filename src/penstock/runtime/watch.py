"""Who waits for whom, and who failed first: what turns a silent hang into an error that names its cause.

Each rank tells a shared key-value store when it has waited for long, and for which rank. When a wait
runs out of time, following those notes from rank to rank ends at the one that waits for nobody: the one
that stalled. The first rank that fails leaves its reason there too.
"""

from __future__ import annotations

import json
import threading
import time
from typing import NamedTuple

from torch.distributed import Store  # type: ignore[attr-defined]

from penstock.errors import PeerLostError, StalledPeerError
from penstock.runtime.lower import Message


class Waiting(NamedTuple):
    """What this rank waits for: `what`, named in words only when told, from or to rank `peer` (None: all)."""

    what: Message | str
    peer: int | None
    since: float

    def __str__(self) -> str:
        return str(self.what.op) if isinstance(self.what, Message) else self.what


class Watch:
    """The watch of `rank` among `ranks`. `timeout`: seconds that a wait may take."""

    def __init__(self, store: Store, rank: int, ranks: int, timeout: float) -> None:
        self._store, self._rank, self._ranks, self.timeout = store, rank, ranks, timeout
        self._waiting: Waiting | None = None
        self._period = min(1.0, timeout / 8)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._publish, name="penstock-watch", daemon=True)
        self._thread.start()

    def begin(self, what: Message | str, peer: int | None) -> None:
        self._waiting = Waiting(what, peer, time.monotonic())

    def end(self) -> None:
        self._waiting = None

    def close(self) -> None:
        self._stop.set()

    def failed(self, reason: str) -> None:
        """Leave word that this rank failed; the first word stays."""
        try:
            self._store.compare_set("failed", "", json.dumps([self._rank, reason]))
        except RuntimeError:  # the store went down with the rank that held it
            return

    def error(self, cause: BaseException) -> PeerLostError | StalledPeerError:
        """The typed error for a wait that broke off with `cause`."""
        waiting = self._waiting or Waiting("an answer", None, time.monotonic())
        waited = time.monotonic() - waiting.since
        peer = "the other ranks" if waiting.peer is None else f"rank {waiting.peer}"
        value = f"rank {self._rank} waiting for {waiting} from {peer}"
        if "timed out" in str(cause).lower():
            time.sleep(2 * self._period)  # let the others' notes come in
            stalled, chain = self._follow(waiting.peer)
            return StalledPeerError(
                value,
                f"{stalled} has been silent for {waited:.0f} s, longer than the timeout of "
                f"{self.timeout:.0f} s{chain}",
                "See what that rank was doing, or give a longer timeout if a step may take that long",
            )
        first = self._first_failure()
        return PeerLostError(
            value,
            f"{first or peer + ' died or closed its connection'}",
            "Mend what is told of that rank; this one only waited for it",
        )

    def _publish(self) -> None:
        told = False
        while not self._stop.wait(self._period):
            waiting = self._waiting
            long = waiting is not None and time.monotonic() - waiting.since > self._period
            if long == told and not long:
                continue
            note = json.dumps([str(waiting), waiting.peer]) if waiting is not None and long else ""
            try:
                self._store.set(f"waits/{self._rank}", note)
            except RuntimeError:
                return
            told = long

    def _note(self, rank: int) -> tuple[str, int | None] | None:
        try:
            if not self._store.check([f"waits/{rank}"]):
                return None
            text = self._store.get(f"waits/{rank}").decode()
        except RuntimeError:
            return None
        what, peer = json.loads(text) if text else (None, None)
        return (what, peer) if what is not None else None

    def _follow(self, peer: int | None) -> tuple[str, str]:
        """The rank at the end of the chain of waits, and the chain in words."""
        if peer is None:
            silent = [r for r in range(self._ranks) if r != self._rank and self._note(r) is None]
            return (" and ".join(f"rank {r}" for r in silent) or "some rank"), ""
        steps, seen = [], {self._rank}
        while peer not in seen and (note := self._note(peer)) is not None and note[1] is not None:
            seen.add(peer)
            steps.append(f"rank {peer} waits for {note[0]} from rank {note[1]}")
            peer = note[1]
        named = f"rank {peer}" if peer != self._rank else "every rank"
        return named, "".join(f"; {step}" for step in steps)

    def _first_failure(self) -> str | None:
        for _ in range(10):
            try:
                if self._store.check(["failed"]):
                    rank, reason = json.loads(self._store.get("failed").decode())
                    return f"rank {rank} failed first: {reason}"
            except RuntimeError:
                return None
            time.sleep(0.1)
        return None
