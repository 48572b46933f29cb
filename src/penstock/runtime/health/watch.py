"""The watch: which rank waits for which, and which failed first. It gives a silent hang a cause.

    every period, each process's thread:   leaves a note (notes.py), and checks that other processes are alive
    a wait that fails:                     follow the notes -> PeerLostError or StalledPeerError
    a wait without a time limit:           look at the notes every period -> the same

When a wait times out, the notes lead to the rank that stalled: it waits for no other rank, or it writes no
notes any more. A step itself sends nothing to the store: the thread reads the executor's records.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple, TypeVar

from torch.distributed import Store  # type: ignore[attr-defined]

from penstock.errors import PeerError, PeerLostError, RunError, StalledPeerError, give_account
from penstock.runtime.health.limits import ANSWERS, begun, is_late, is_of_peer
from penstock.runtime.health.notes import FailureNotes, FirstFailure, LimitedStore, PeerWait, Pulse, lives
from penstock.runtime.recorder import Progress, account
from penstock.schedule import Op
from penstock.schedule.order import Message
from penstock.shortages import OUT_OF_MEMORY, out_of_memory_kills, shortage

_PATIENCE = 0.5  # seconds to wait for the first failure's reason; it is written before connections close
_START = 20.0  # seconds: the store's limit at start-up, and the most that it may be until something fails
_LINGERS = 10.0  # seconds that Python's exit waits for the last note
_NOTICES = 1.0  # seconds in which a rank notices by itself that another one has failed
_CEASED = 3  # periods without a note after which a rank counts as stuck
_GONE = "; the store of the ranks' notes does not answer: this rank may be cut off, or its machine has ended"


T = TypeVar("T")


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
    """The watch of `process` among the first `processes` of a job. timeout: seconds that a wait may take

    Ranks are processes, unless `number_ranks` says otherwise.
    """

    def __init__(self, store: Store, process: int, processes: int, timeout: float) -> None:
        self._store = LimitedStore(store, _START)
        self._notes = FailureNotes(self._store, process)
        self._pulse = Pulse(self._notes, range(processes))
        self._process, self._rank, self.timeout = process, process, timeout
        self._members: Sequence[int] = range(processes)
        self._everyone = range(processes)
        self.gives_up: Callable[[], object] = lambda: None  # called once this rank has left its notes
        # ends a call of torch or NCCL that blocks this rank's host, where that is possible: see `_free_host`
        self.frees: Callable[[], object] | None = None
        self._over = self._overdue = False  # this rank knows of a failure; its own op takes too long
        self._kills = out_of_memory_kills()
        self._bereaved = False  # whether it has recorded the end of a process of its machine
        self._op: tuple[int, Op] | None = None
        self._began = 0.0
        self._waiting: Waiting | None = None
        self._progress: Callable[[], Progress | None] = lambda: None
        self._period = min(1.0, timeout / 8)
        self._leave_note()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._publish, name="penstock-watch", daemon=True)
        self._thread.start()
        # 0.2.0: a thread that came back from the store while Python was ending aborted the process
        atexit.register(self._process_ends)

    def number_ranks(self, members: Sequence[int]) -> None:
        """From now on a rank is an index into `members`, the processes of one pipeline of the job."""
        self._members, self._rank = [*members], [*members].index(self._process)
        self._store.limit = max(ANSWERS, min(self.timeout, _START))

    def follow(self, progress: Callable[[], Progress | None]) -> None:
        """From now on, publish `progress`, which is called in the watch's own thread."""
        self._progress = progress

    def absent(self, seconds: float) -> list[int]:
        """Wait for the first note of each process. Returns those without one after that time."""
        return self._notes.absent(self._everyone, seconds)

    @property
    def cut_off(self) -> bool:
        """Whether the store no longer answers."""
        return self._store.gone

    # ---- waits

    def begin(self, what: Message | str, peer: int | None) -> None:
        if self._waiting is None or self._waiting[:2] != (what, peer):  # else the same wait goes on
            self._waiting = Waiting(what, peer, time.monotonic())

    def end(self) -> None:
        self._waiting = None

    @contextmanager
    def waiting(
        self,
        what: Message | str,
        peer: int | None,
        ends: Callable[[BaseException], bool] = lambda cause: True,
    ) -> Iterator[None]:
        """A wait, perhaps within another one. Raises the typed error if it fails.

        ends: whether a RuntimeError comes from the wait, and not from other code in the block
        """
        before = self._waiting
        self.begin(what, peer)
        try:
            yield
        except RuntimeError as cause:
            if not ends(cause):
                raise
            before = self._waiting  # the notes go on to name the wait that failed
            raise self.error(cause) from cause
        finally:
            self._waiting = before

    def wait_patiently(self, what: str, wait: Callable[[timedelta], object], limit: timedelta) -> None:
        """Wait in any thread for all other ranks, which may take up to `limit`, for example for a disk.

        wait: waits for the given time, and raises RuntimeError where that was too short, or a rank is gone

        Raises PeerLostError; StalledPeerError where a rank has left no notes for the timeout, or for a few
        periods if this rank knows of a failure.
        """
        waiting = Waiting(what, None, time.monotonic())
        while True:
            began = time.monotonic()
            try:
                wait(timedelta(seconds=self._period))
                return
            except RuntimeError as cause:
                if not is_late(cause):
                    raise self._own_shortage(cause) or self._lost(waiting) from cause
                self._pulse.look()
                seconds = self._periods if self._over else self.timeout
                stuck = [] if self._store.gone else self._ceased(self._everyone, seconds)
                cut_off = self._store.gone and waiting.seconds > self.timeout
                over = time.monotonic() - began < self._period / 2  # torch gave up early
                if stuck or cut_off or over or waiting.seconds > limit.total_seconds():
                    if not (stuck or self._store.gone):  # the limit may be the timeout itself, as in start-up
                        stuck = self._ceased(self._everyone, self._periods)
                    raise self._stalled(waiting, stuck) from cause
                if any(self._pulse.still(process) > seconds for process in self._others(self._everyone)):
                    raise self._lost(waiting) from cause  # one that knew of a failure has ended

    def call_together(self, what: str, call: Callable[[], T], limit: timedelta) -> T:
        """Return the result of `call`, which blocks until all other ranks have made it too.

        It runs in another thread, as torch does not end it where a rank has ended that had not yet joined.

        Raises what `wait_patiently` does; PeerLostError as well where a rank has failed meanwhile.
        """
        wait = begun(what, call)

        def look(period: timedelta) -> None:
            try:
                wait(period)
            except RuntimeError as cause:
                if is_late(cause) and self.broken:
                    raise RuntimeError("connection closed: a rank has failed") from cause
                if is_late(cause) or is_of_peer(cause):
                    raise  # else it is an error of the call, which is raised below

        self.wait_patiently(what, look, limit)
        return wait(timedelta(0))

    @property
    def broken(self) -> bool:
        """Whether a rank has failed, or was reported to be silent."""
        return self._notes.first_failure("failed", "silent") is not None

    # ---- the end

    def close(self) -> None:
        atexit.unregister(self._process_ends)
        self._stop.set()
        self._thread.join(_LINGERS)
        self._notes.process_id = None  # this process may end from now on
        self._leave_note()
        self._store.close()

    def _process_ends(self) -> None:
        """Record that Python ends while the pipeline is open, for ranks that still wait for this one."""
        error = getattr(sys, "last_value", None)  # the error whose traceback Python has printed
        why = "" if error is None else f": {type(error).__name__}: {error}"
        self._record(f"its process ended before it closed its pipeline{why}")
        self.close()

    def failed(self, reason: str) -> None:
        """Record that this rank failed; the first record stays."""
        self._record(reason)
        self._freeze()
        self.gives_up()

    def _record(self, reason: str) -> None:
        self._notes.fail(FirstFailure(self._process, self._notes.host, reason))

    @property
    def _out_of_memory(self) -> str:
        """What the end of a process may be due to, in words: memory, or nothing that is known."""
        return OUT_OF_MEMORY if out_of_memory_kills() > self._kills else ""

    def _record_death(self, process: int, how: str = "died or closed its connection") -> None:
        reason = f"it {how}, as {self._own_name} noticed{self._out_of_memory}"
        self._notes.fail(FirstFailure(process, self._host(process), reason))

    def _own_shortage(self, cause: BaseException) -> RunError | None:
        """The error of a wait that failed because this process itself has run out of something."""
        own = shortage(cause)
        if own is not None:
            self.failed(f"{own.value}: {own.rule}")
        return own

    # ---- errors

    def error(self, cause: BaseException, what: Message | str = "", peer: int | None = None) -> RunError:
        """The typed error for a wait that failed with `cause`: the one for `what`, or the one last begun.

        A PeerLostError or StalledPeerError, unless this process has run out of something.
        """
        if (own := self._own_shortage(cause)) is not None:
            return own
        if what:
            self.begin(what, peer)
        waiting = self._waiting or Waiting("an answer", None, time.monotonic())
        self._store.limit = ANSWERS
        # at once, as the store may end with the first process; a rank may fail while its process lives on
        failed = self._notes.first_failure("failed")
        if (is_late(cause) or self._overdue) and failed is None:
            self._pulse.look()
            error: PeerLostError | StalledPeerError = self._stalled(waiting, *self._follow(waiting.peer))
        else:
            error = self._lost(waiting, getattr(cause, "rank", None), failed)
        self.gives_up()
        return error

    def _stalled(self, waiting: Waiting, blamed: Sequence[int], chain: str = "") -> StalledPeerError:
        """blamed: processes; chain: how the notes lead to them, in words"""
        named = " and ".join(map(self._name, blamed)) or "some rank"
        culprit: int | None = blamed[0] if blamed else None
        if self._process in blamed:  # the chain of waits is a cycle
            named, culprit = "every rank", None
        silent = f"{'have' if len(blamed) > 1 else 'has'} been silent for {waiting.seconds:.0f} s"
        reason = f"it has been silent for {waiting.seconds:.0f} s, as {self._own_name} noticed"
        if culprit is None:
            reason = f"{self._own_name} {waiting.words}: {named} {silent}"
        # at once: gloo closes a rank's connections when one of its waits times out, and its peers ask why
        self._notes.fail(FirstFailure(culprit, self._host(culprit), reason), "silent")
        self._freeze()
        error = StalledPeerError(
            f"rank {self._rank} {waiting.words}",
            f"{named} {silent}, longer than the timeout of {self.timeout:.0f} s{chain}{self._gone}",
            "See what that rank was doing, or give a longer timeout if a step may take that long",
        )
        self._describe(error, waiting, blamed)
        return error

    def _lost(
        self, waiting: Waiting, lost: int | None = None, first: FirstFailure | None = None
    ) -> PeerLostError:
        """lost: the rank that is known to be gone; first: the first failure, if it is known"""
        self._freeze()
        self._pulse.look()
        lost = waiting.peer if lost is None else lost
        first = first or self._notes.first_failure("failed", "silent", patience=self._patience(lost))
        self._pulse.look()
        blamed = [] if lost is None else [self._members[lost]]
        if first is None and any(note.last for note in map(self._pulse.note, blamed) if note is not None):
            # it closed its connections because it has lost another rank, which it will record
            first = self._notes.first_failure("failed", "silent", patience=4 * _PATIENCE)
        if first is not None:
            rule, blamed = first.reason, []
            if first.process is not None:
                blamed = [first.process]
                rule = f"{self._name(first.process, first.host)} failed first: {first.reason}"
        else:
            blamed = blamed or ([] if self._store.gone else self._ceased(self._members, self._periods / 2))
            named = " and ".join(map(self._name, blamed)) or "some rank"
            rule = f"{named} died or closed its connection{self._out_of_memory}"
            if blamed:  # so that ranks that lose this one next name the first lost rank
                self._record_death(blamed[0])
        error = PeerLostError(
            f"rank {self._rank} {waiting.words}",
            f"{rule}{self._gone}",
            "Fix the cause on that rank; this one only waited for it",
        )
        self._describe(error, waiting, blamed)
        return error

    def _patience(self, lost: int | None) -> float:
        """Seconds to wait for the first failure's reason."""
        if lost is None:  # nobody records an unknown loss: wait until the lost rank's notes stop changing
            return max(6 * _PATIENCE, self._periods)
        return 0.0 if self._has_ended(self._members[lost]) else _PATIENCE  # a killed one writes none

    def _describe(self, error: PeerError, waiting: Waiting, blamed: Sequence[int]) -> None:
        progress = self._progress()
        error.rank, error.op, error.peer, error.waited = (
            self._rank, str(waiting), waiting.peer, waiting.seconds)  # fmt: skip
        error.last_ops = progress.last_ops if progress is not None else ()
        others = {process: self._pulse.report(process) for process in self._others(self._members)}
        error.reports = {self._members.index(p): words for p, words in others.items() if words is not None}
        error.peer_report = "; ".join(
            f"{self._name(process, '')} {self._pulse.report(process) or 'never reported'}"
            for process in self._others(blamed)
        )
        give_account(error, account(progress, waiting.words))

    def name_of(self, rank: int) -> str:
        """A rank and its host, if the host is known."""
        self._pulse.look()
        return self._name(self._members[rank])

    def _name(self, process: int, host: str | None = None) -> str:
        """host: where it is, None for what its note says"""
        is_rank = process in self._members
        named = f"rank {self._members.index(process)}" if is_rank else f"process {process}"
        host = self._host(process) if host is None else host
        return f"{named} on {host}" if host else named

    @property
    def _own_name(self) -> str:
        """This rank's name in a note. Other pipelines of the job, with ranks of their own, read it too."""
        if len(self._members) == len(self._everyone):
            return self._name(self._process)
        return f"process {self._process} on {self._notes.host}"

    def _host(self, process: int | None) -> str:
        note = None if process is None else self._pulse.note(process)
        return "" if note is None else note.host

    @property
    def _gone(self) -> str:
        return _GONE if self._store.gone else ""

    # ---- notes

    def _freeze(self) -> None:
        """Publish the progress of this rank, and keep it: its executor will forget the step."""
        last = self._progress()
        self._progress, self._over = (lambda: last), True
        self._leave_note()

    def _publish(self) -> None:
        looked = -self.timeout
        while not self._stop.wait(self._period):
            self._leave_note()
            stale = time.monotonic() - looked > self.timeout / 2  # twice a timeout: which notes change
            if stale or any(self._pulse.note(process) is None for process in self._others(self._everyone)):
                self._pulse.look()
                looked = time.monotonic()
            if not self._bereaved:
                self._notice_deaths()
            if self.frees is not None and not self._over:
                self._free_host(self.frees)

    def _notice_deaths(self) -> None:
        """Record processes of this machine that have ended without recording why.

        Over NCCL no other rank would notice: no connection breaks.
        """
        ended = list(filter(self._has_ended, self._others(self._everyone)))
        if ended:
            self._pulse.look()  # a process may have left a note before it ended
        for process in filter(self._has_ended, ended):
            self._record_death(process, "ended without closing its pipeline")
            self._bereaved = True

    def _has_ended(self, process: int) -> bool:
        note = self._pulse.note(process)
        if note is None or note.last or note.process_id is None:
            return False
        return lives(note.process_id) is False

    def _free_host(self, free: Callable[[], object]) -> None:
        """End an op of this rank that takes too long, or that another rank's failure may block.

        On NCCL an op may read a value that never arrives, which no time limit ends. Once NCCL's groups are
        aborted, the op goes on with whatever it reads, and the next wait for another rank raises the error.
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

    def _leave_note(self) -> None:
        waiting = self._waiting
        words = "" if waiting is None else waiting.words
        wait = None
        if waiting is not None and waiting.seconds > self._period:
            wait = PeerWait(str(waiting), None if waiting.peer is None else self._members[waiting.peer])
        self._notes.leave(str(account(self._progress(), words)), wait, self._over)

    @property
    def _periods(self) -> float:
        """Seconds without a note after which a process counts as stuck."""
        return _CEASED * self._period

    def _others(self, processes: Sequence[int]) -> list[int]:
        return [process for process in processes if process != self._process]

    def _ceased(self, processes: Sequence[int], seconds: float) -> list[int]:
        """The processes that have left no note for `seconds`, though they knew of no failure."""
        notes = {process: self._pulse.note(process) for process in self._others(processes)}
        return [
            process
            for process, note in notes.items()
            if self._pulse.still(process) > seconds and not (note is not None and note.last)
        ]

    def _waits(self, process: int) -> PeerWait | None:
        """The wait that a process reports; None if its notes have stopped, because it is stuck itself."""
        note = self._pulse.note(process)
        stuck = note is None or (not note.last and self._pulse.still(process) > self._periods)
        return None if note is None or stuck else note.wait

    def _follow(self, peer: int | None) -> tuple[list[int], str]:
        """The processes at the end of the chain of waits, and the chain in words."""
        if self._store.gone:
            return [] if peer is None else [self._members[peer]], ""
        if peer is None:
            ceased = self._ceased(self._everyone, self._periods)
            return ceased or [p for p in self._others(self._members) if self._waits(p) is None], ""
        process, steps, seen = self._members[peer], list[str](), {self._process}
        while process not in seen and (wait := self._waits(process)) is not None and wait.peer is not None:
            seen.add(process)
            steps.append(f"{self._name(process, '')} waits for {wait.what} from {self._name(wait.peer, '')}")
            process = wait.peer
        return [process], "".join(f"; {step}" for step in steps)
