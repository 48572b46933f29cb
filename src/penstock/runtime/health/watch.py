"""The watch: which rank waits for which, and which failed first. It gives a silent hang a cause.

    every period, each rank's thread:   store["note/<rank>"] = time, account, the wait that has lasted
    the first rank that fails:          store["failed"] = rank, reason
    a wait that fails:                  follow the notes -> PeerLostError or StalledPeerError

When a wait times out, the notes lead to the rank that stalled: it waits for no other rank, or it writes no
notes any more. A step itself sends nothing to the store: the thread reads the executor's records.
"""

from __future__ import annotations

import atexit
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple

from torch.distributed import Store  # type: ignore[attr-defined]

from penstock.errors import PeerError, PeerLostError, StalledPeerError, give_account
from penstock.runtime.plan import Message
from penstock.runtime.recorder import Progress, account
from penstock.runtime.transport.groups import is_late
from penstock.schedule import Op

End = Literal["failed", "silent"]  # "silent": longer than another rank's timeout

_PATIENCE = 0.5  # seconds to wait for the first failure's reason; it is left before connections close
_LINGERS = 10.0  # seconds that Python's exit waits for a note to be left
_NOTICES = 5.0  # seconds in which a rank notices by itself that another one has failed
_CEASED = 3  # periods without a note after which a rank counts as stuck


class Wait(NamedTuple):
    """A wait that has lasted: for `what`, from rank `peer` (None: from all)."""

    what: str
    peer: int | None


class FailureNote(NamedTuple):
    """A rank's report of itself. at: its wall clock, which the machines are trusted to agree on"""

    at: float
    account: str
    wait: Wait | None

    @property
    def age(self) -> float:
        return max(0.0, time.time() - self.at)

    def __str__(self) -> str:
        return f"last reported {self.age:.1f} s ago: {self.account}"


class FailureNotes:
    """The notes of `rank` and of the others in torch's key-value store, one note a rank.

    A rank that cannot reach the store goes on without it: it ends with the process that holds it.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self._store, self.rank = store, rank

    def leave(self, account: str, wait: Wait | None) -> bool:
        """Replace this rank's note; returns whether that worked."""
        try:
            self._store.set(f"note/{self.rank}", json.dumps((time.time(), account, wait)))
        except RuntimeError:
            return False
        return True

    def read(self, rank: int) -> FailureNote | None:
        text = self._read(f"note/{rank}")
        if text is None:
            return None
        at, account, wait = json.loads(text)
        return FailureNote(at, account, Wait(*wait) if wait else None)

    def fail(self, rank: int, reason: str, end: End = "failed") -> None:
        """Record how `rank` ended; the first record of each kind stays."""
        try:
            self._store.compare_set(end, "", json.dumps((rank, reason)))
        except RuntimeError:
            return

    def first_failure(self, *ends: End, patience: float = 0.0) -> tuple[int, str] | None:
        """The first rank that ended in one of these ways, and the reason. Waits up to `patience` seconds."""
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


class Waiting(NamedTuple):
    """The wait that this rank is in: for `what`, from or to rank `peer` (None: all)."""

    what: Message | str
    peer: int | None
    since: float

    def __str__(self) -> str:
        return str(self.what.op) if isinstance(self.what, Message) else self.what

    @property
    def whom(self) -> str:
        return "the other ranks" if self.peer is None else f"rank {self.peer}"

    @property
    def words(self) -> str:
        return f"waiting for {self} from {self.whom}"

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.since


class Watch:
    """The watch of `rank` among `ranks`. timeout: seconds that a wait may take"""

    def __init__(self, store: Store, rank: int, ranks: int, timeout: float) -> None:
        self._notes, self._rank, self._ranks, self.timeout = FailureNotes(store, rank), rank, ranks, timeout
        self._mesh_notes: FailureNotes | None = None  # by process, of all pipelines of the mesh
        self.gives_up: Callable[[], object] = lambda: None  # called once this rank has left its notes
        # ends what holds up this rank's host in foreign code, where something can: see `_free_host`
        self.frees: Callable[[], object] | None = None
        self._over = self._overdue = False  # whether this rank knows of a failure, and of an op of its own
        self._op: tuple[int, Op] | None = None
        self._began = 0.0
        self._waiting: Waiting | None = None
        self._progress: Callable[[], Progress | None] = lambda: None
        self._period = min(1.0, timeout / 8)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._publish, name="penstock-watch", daemon=True)
        self._thread.start()
        # 0.2.0: a thread that came back from the store while Python was ending aborted the process
        atexit.register(self.close)

    def follow(self, progress: Callable[[], Progress | None]) -> None:
        """From now on, publish `progress`, which is called in the watch's own thread."""
        self._progress = progress

    def share_failures(self, store: Store, process: int) -> None:
        """From now on, share failures with the mesh's other pipelines, which do not see these notes."""
        self._mesh_notes = FailureNotes(store, process)

    def begin(self, what: Message | str, peer: int | None) -> None:
        if self._waiting is None or self._waiting[:2] != (what, peer):  # else the same wait goes on
            self._waiting = Waiting(what, peer, time.monotonic())

    def end(self) -> None:
        self._waiting = None

    @contextmanager
    def waiting(self, what: Message | str, peer: int | None) -> Iterator[None]:
        """A wait. Raises the typed error if it fails."""
        self.begin(what, peer)
        try:
            yield
        except RuntimeError as cause:
            raise self.error(cause) from cause
        finally:
            self.end()

    @property
    def broken(self) -> bool:
        """Whether a rank has failed, or was reported to be silent."""
        notes = filter(None, (self._notes, self._mesh_notes))
        return any(each.first_failure("failed", "silent") is not None for each in notes)

    def close(self) -> None:
        atexit.unregister(self.close)
        self._stop.set()
        self._thread.join(_LINGERS)

    def failed(self, reason: str) -> None:
        """Record that this rank failed; the first record stays."""
        self._notes.fail(self._rank, reason)
        self._fail_mesh(reason, "failed")
        self._freeze()
        self.gives_up()

    def _fail_mesh(self, reason: str, end: End) -> None:
        if self._mesh_notes is not None:
            self._mesh_notes.fail(self._mesh_notes.rank, reason, end)

    def error(
        self, cause: BaseException, what: Message | str = "", peer: int | None = None
    ) -> PeerLostError | StalledPeerError:
        """The typed error for a wait that failed with `cause`: the one for `what`, or the one last begun."""
        if what:
            self.begin(what, peer)
        waiting = self._waiting or Waiting("an answer", None, time.monotonic())
        notes = filter(None, (self._notes, self._mesh_notes))
        # a rank may have failed while its process lives on: then waits time out too
        failed = any(each.first_failure("failed") is not None for each in notes)
        late = (is_late(cause) or self._overdue) and not failed
        error = self._stalled(waiting) if late else self._lost(waiting)
        self.gives_up()
        return error

    def _stalled(self, waiting: Waiting) -> StalledPeerError:
        blamed, chain = self._follow(waiting.peer)
        named = " and ".join(f"rank {rank}" for rank in blamed) or "some rank"
        if blamed == [self._rank]:  # the chain of waits leads back
            named = "every rank"
        silent = f"has been silent for {waiting.seconds:.0f} s"
        # at once: gloo closes a rank's connections when one of its waits times out, and its peers ask why
        if blamed:
            self._notes.fail(blamed[0], f"it {silent}, as rank {self._rank} noticed", "silent")
        self._fail_mesh(f"rank {self._rank} {waiting.words}: {named} {silent}", "silent")
        self._freeze()
        error = StalledPeerError(
            f"rank {self._rank} {waiting.words}",
            f"{named} {silent}, longer than the timeout of {self.timeout:.0f} s{chain}",
            "See what that rank was doing, or give a longer timeout if a step may take that long",
        )
        self._describe(error, waiting, blamed)
        return error

    def _lost(self, waiting: Waiting) -> PeerLostError:
        self._freeze()
        blamed = waiting.peer
        patience = 2 * _PATIENCE if blamed is None else _PATIENCE  # a rank that knows its lost peer says so
        first = self._notes.first_failure("failed", "silent", patience=patience)
        elsewhere = None
        if first is None and self._mesh_notes is not None:
            elsewhere = self._mesh_notes.first_failure("failed", "silent")
        if first is not None:
            blamed, reason = first
            rule = f"rank {blamed} failed first: {reason}"
        elif elsewhere is not None:
            rule = f"process {elsewhere[0]} failed first: {elsewhere[1]}"
        else:
            rule = f"{waiting.whom} died or closed its connection"
            if blamed is not None:  # so that the ranks that lose this one next name the first one
                self._notes.fail(blamed, f"it died or closed its connection, as rank {self._rank} noticed")
        error = PeerLostError(
            f"rank {self._rank} {waiting.words}",
            rule,
            "Fix the cause on that rank; this one only waited for it",
        )
        self._describe(error, waiting, [] if blamed is None else [blamed])
        return error

    def _describe(self, error: PeerError, waiting: Waiting, blamed: Sequence[int]) -> None:
        progress = self._progress()
        error.rank, error.op, error.peer, error.waited = (
            self._rank, str(waiting), waiting.peer, waiting.seconds)  # fmt: skip
        error.last_ops = progress.last_ops if progress is not None else ()
        others = {rank: self._notes.read(rank) for rank in range(self._ranks) if rank != self._rank}
        error.reports = {rank: str(note) for rank, note in others.items() if note is not None}
        error.peer_report = "; ".join(
            f"rank {rank} {error.reports.get(rank, 'never reported')}" for rank in blamed if rank in others
        )
        give_account(error, account(progress, waiting.words))

    def _freeze(self) -> None:
        """Publish the progress of this rank, and keep it: its executor will forget the step."""
        last = self._progress()
        self._progress, self._over = (lambda: last), True
        self._leave_note()

    def _publish(self) -> None:
        while not self._stop.wait(self._period):
            if not self._leave_note():
                return
            if self.frees is not None and not self._over:
                self._free_host(self.frees)

    def _free_host(self, free: Callable[[], object]) -> None:
        """End an op of this rank that lasts too long, or that another rank's failure may hold up.

        On NCCL an op may read a value that never comes, which no time limit ends. Once NCCL's groups are
        aborted it goes on with whatever it reads, and the next wait for another rank raises the error.
        """
        progress, now = self._progress(), time.monotonic()
        op = None if progress is None or progress.current is None else (len(progress.done), progress.current)
        if op is None or op != self._op:
            self._op, self._began = op, now
            return
        lasted = now - self._began
        self._overdue = lasted > self.timeout
        if self._overdue or (lasted > _NOTICES and self.broken):
            self._over = True
            free()

    def _leave_note(self) -> bool:
        waiting = self._waiting
        words = "" if waiting is None else waiting.words
        lasts = waiting is not None and waiting.seconds > self._period
        wait = Wait(str(waiting), waiting.peer) if waiting is not None and lasts else None
        return self._notes.leave(str(account(self._progress(), words)), wait)

    def _waits(self, rank: int) -> Wait | None:
        """The wait that `rank` reports; None if its reports have stopped: then it is stuck itself."""
        note = self._notes.read(rank)
        return None if note is None or note.age > _CEASED * self._period else note.wait

    def _follow(self, peer: int | None) -> tuple[list[int], str]:
        """The ranks at the end of the chain of waits, and the chain in words."""
        if peer is None:
            return [r for r in range(self._ranks) if r != self._rank and self._waits(r) is None], ""
        steps, seen = [], {self._rank}
        while peer not in seen and (wait := self._waits(peer)) is not None and wait.peer is not None:
            seen.add(peer)
            steps.append(f"rank {peer} waits for {wait.what} from rank {wait.peer}")
            peer = wait.peer
        return [peer], "".join(f"; {step}" for step in steps)
