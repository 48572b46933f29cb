"""The notes that ranks leave for each other, and whom a wait that comes to nothing blames."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from threading import Event
from unittest.mock import Mock

import pytest
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from penstock.errors import PeerError, PeerLostError, StalledPeerError
from penstock.runtime.health import watch as health
from penstock.runtime.health.notes import (
    FailureNote,
    FailureNotes,
    LimitedStore,
    PeerWait,
    ProcessId,
    began,
    machine,
)
from penstock.runtime.health.watch import Watch
from penstock.runtime.recorder import Progress, account
from penstock.runtime.transport.stream_channels import hold_up_until
from penstock.schedule import Op, build
from penstock.schedule.order import Message
from support.refusals import refuses

TIMEOUT = 0.4  # a note every 0.05 s
TIMED_OUT, CLOSED = RuntimeError("Timed out waiting 400ms"), RuntimeError("Connection closed by peer")
PROGRAM = build("1f1b", ranks=4, microbatches=6).programs[2]
HOST = socket.gethostname()
FORWARDS = [Op(0, "F", m) for m in range(3)]  # which have no phases

Start = Callable[[int], Watch]


def at(done: int, inside: bool = False) -> Progress:
    return Progress(PROGRAM, PROGRAM[:done], PROGRAM[done] if inside else None)


@pytest.fixture
def store() -> Store:
    return HashStore()


@pytest.fixture
def start(store: Store) -> Iterator[Start]:
    started = []

    def start(rank: int) -> Watch:
        started.append(Watch(store, rank, 4, TIMEOUT))
        return started[-1]

    yield start
    for watch in started:
        watch.close()


# _CEASED: notes count for longer
@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Notes count for longer: on a busy machine a thread may leave none for some periods."""
    monkeypatch.setattr(health, "_CEASED", 40)


def notes(store: Store, process: int) -> FailureNotes:
    return FailureNotes(LimitedStore(store), process)


def waits(watch: Watch, op: str, target: int) -> None:
    message = Message(Op.parse(op), target)
    watch.begin(message, message.op.stage)


@pytest.mark.parametrize(
    ("progress", "waiting", "said"),
    [
        (None, "", "at work, before the first step"),
        (at(0), "", "before 2F0, warm-up; 0 of 12 ops done"),
        (at(1, True), "", "in 2F1, warm-up; 1 of 12 ops done, the last 2F0"),
        (at(2), "waiting for 3B0", "waiting for 3B0, steady phase; 2 of 12 ops done, the last 2F0 2F1"),
        (at(9, True), "", "in 2F5, steady phase; 9 of 12 ops done, the last 2B2 2F4 2B3"),
        (at(10, True), "", "in 2B4, drain; 10 of 12 ops done, the last 2F4 2B3 2F5"),
        (Progress(FORWARDS, FORWARDS[:1], FORWARDS[1]), "", "in 0F1; 1 of 3 ops done, the last 0F0"),
        (Progress(PROGRAM, PROGRAM, None), "", "between steps; 12 of 12 ops done, the last 2F5 2B4 2B5"),
    ],
)  # fmt: skip
def test_what_a_rank_does_in_words(progress: Progress | None, waiting: str, said: str) -> None:
    assert str(account(progress, waiting)) == said


def test_the_thread_publishes_progress_and_asks_for_it_once_a_period(store: Store, start: Start) -> None:
    asked = []

    def progress() -> Progress:
        asked.append(time.monotonic())
        return at(3, True)

    start(2).follow(progress)
    time.sleep(5 * TIMEOUT / 8)
    note = notes(store, 0).read([2])[2]
    assert 0 <= time.monotonic() - note.at < TIMEOUT
    assert note.account == "in 2F2, steady phase; 3 of 12 ops done, the last 2F0 2F1 2B0"
    assert 2 <= len(asked) <= 6


@pytest.mark.usefixtures("patient")
def test_the_chain_of_waits_ends_at_the_rank_that_stalled(start: Start) -> None:
    watches = [start(rank) for rank in range(4)]
    watches[0].follow(lambda: at(4))
    watches[2].follow(lambda: at(3, True))
    waits(watches[0], "1B0", 0)
    waits(watches[1], "2B0", 1)
    waits(watches[3], "2F2", 3)
    time.sleep(TIMEOUT)
    error = watches[0].error(TIMED_OUT)
    assert isinstance(error, StalledPeerError)
    assert (error.rank, error.op, error.peer) == (0, "1B0", 1)
    assert TIMEOUT <= error.waited < TIMEOUT + 1
    assert error.last_ops == PROGRAM[1:4]
    brief, report, own = str(error).splitlines()
    assert brief.startswith(f"rank 0 waiting for 1B0 from rank 1: rank 2 on {HOST} has been silent for 0 s")
    assert "; rank 1 waits for 2B0 from rank 2. " in brief
    assert report.startswith("  rank 2 last reported 0.")
    assert report.endswith("s ago: in 2F2, steady phase; 3 of 12 ops done, the last 2F0 2F1 2B0")
    assert own.startswith("  rank 0 waiting for 1B0 from rank 1, steady phase; 4 of 12 ops done")
    assert set(error.reports) == {1, 2, 3}
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.reports) == (str(error), error.reports)


def test_a_rank_whose_notes_have_ceased_is_blamed_whatever_it_said_last(start: Start) -> None:
    """0.2.0: one that was stopped while its note said that it waited was passed over for its own peer."""
    first, stopped, third = start(1), start(2), start(3)
    waits(stopped, "3B0", 2)
    time.sleep(TIMEOUT / 2)
    stopped.close()
    waits(first, "2B0", 1)
    third.follow(lambda: at(2, True))
    time.sleep(TIMEOUT)
    assert f"from rank 2: rank 2 on {HOST} has been silent" in str(first.error(TIMED_OUT))


@pytest.mark.usefixtures("patient")
def test_a_circle_of_waits_blames_every_rank(start: Start) -> None:
    one, two = start(0), start(1)
    waits(one, "1B0", 0)
    waits(two, "0F1", 1)
    time.sleep(TIMEOUT)
    assert "every rank has been silent" in str(one.error(TIMED_OUT))


@pytest.mark.usefixtures("patient")
def test_a_wait_for_all_blames_those_that_wait_for_nobody(start: Start) -> None:
    watches = [start(rank) for rank in range(4)]
    for rank in (0, 1, 3):
        watches[rank].begin("the end of the step", None)
    time.sleep(TIMEOUT)
    error = watches[0].error(TIMED_OUT)
    assert str(error).startswith(
        f"rank 0 waiting for the end of the step from the other ranks: rank 2 on {HOST} has been silent"
    )


@pytest.mark.usefixtures("patient")
def test_a_rank_that_can_blame_nobody_blames_no_rank_of_its_own(store: Store, start: Start) -> None:
    """0.5.0: where all waited for a rank of another pipeline, the first to notice was said to be silent."""
    watches = [start(process) for process in range(4)]
    for watch, members in zip(watches, ([0, 2], [1, 3], [0, 2], [1, 3]), strict=True):
        watch.number_ranks(members)
        watch.begin("the loss of the other parts of the batch", None)
    time.sleep(TIMEOUT)
    assert ": some rank has been silent" in str(watches[2].error(TIMED_OUT))
    first = notes(store, 0).first_failure("failed", "silent")
    assert first is not None
    assert first.process is None
    lost = str(watches[1].error(CLOSED))
    waiting = f"process 2 on {HOST} waiting for the loss of the other parts of the batch from the other ranks"
    assert f"from the other ranks: {waiting}: some rank has been silent" in lost


# _CEASED: notes cease sooner
@pytest.mark.usefixtures("patient")
def test_a_rank_of_another_pipeline_whose_notes_have_ceased_is_named(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.5.0: "some rank has been silent", where a rank of another part of the batch was stopped."""
    watches = [start(process) for process in range(4)]
    for watch, members in zip(watches, ([0, 2], [1, 3], [0, 2], [1, 3]), strict=True):
        watch.number_ranks(members)
        watch.begin("the loss of the other parts of the batch", None)
    watches[3].close()
    time.sleep(TIMEOUT)
    monkeypatch.setattr(health, "_CEASED", 3)
    assert f": process 3 on {HOST} has been silent" in str(watches[2].error(TIMED_OUT))


def test_a_wait_whose_limit_is_the_timeout_names_who_is_silent(store: Store) -> None:
    """0.5.0: "some rank has been silent", as ranks met: a rank counted as silent once it had been so for
    longer than the timeout, and by then the wait was over."""
    waiting, stopped = Watch(store, 0, 2, TIMEOUT), Watch(store, 1, 2, TIMEOUT)
    stopped.close()

    def late(limit: timedelta) -> None:
        time.sleep(limit.total_seconds())
        raise TIMED_OUT

    with refuses(StalledPeerError, "the meeting", f"rank 1 on {HOST} has been silent"):
        waiting.wait_patiently("the meeting", late, timedelta(seconds=TIMEOUT))
    waiting.close()


def test_what_all_ranks_do_together_ends_once_one_of_them_has_failed(start: Start) -> None:
    """0.5.0: a rank that was killed before it joined a group was noticed after the timeout: torch waits."""
    waiting, failed, never = start(0), start(1), Event()
    failed.failed("ValueError: no")
    began = time.monotonic()
    with pytest.raises(PeerLostError, match=f"rank 1 on {HOST} failed first: ValueError: no"):
        waiting.call_together("the making of a group", never.wait, timedelta(seconds=60))
    assert time.monotonic() - began < 10
    never.set()


def test_what_all_ranks_do_together_gives_its_result_or_its_own_error(start: Start) -> None:
    watch = start(0)
    assert watch.call_together("a group", lambda: 7, timedelta(seconds=60)) == 7
    with pytest.raises(RuntimeError, match="no such backend"):
        watch.call_together(
            "a group", Mock(side_effect=RuntimeError("no such backend")), timedelta(seconds=60)
        )
    with pytest.raises(PeerLostError):
        watch.call_together("a group", Mock(side_effect=CLOSED), timedelta(seconds=60))


def test_a_wait_that_fails_for_want_of_something_blames_no_peer(start: Start) -> None:
    """0.5.0: with 24 descriptors a rank was blamed, and the log never said descriptors."""
    short, other = start(0), start(1)
    gloo = RuntimeError("[enforce fail at /gloo/transport/tcp/device.cc:150] Too many open files")
    error = short.error(gloo)
    assert not isinstance(error, PeerError)
    assert error.value.startswith("ulimit -n ")
    lost = other.error(CLOSED)
    assert f"rank 0 on {HOST} failed first: ulimit -n " in str(lost)


def test_a_rank_that_the_kernel_killed_for_memory_is_named_with_that(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = start(0)
    monkeypatch.setattr(health, "out_of_memory_kills", lambda: 1 << 30)
    waits(watch, "1B0", 0)
    watch.error(CLOSED)
    assert "as memory ran out" in str(start(2).error(CLOSED))


# _notes, _boot, _store: the notes of another machine, with its clock
def test_notes_of_a_machine_whose_clock_is_wrong_count_as_others(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.5.0: a rank whose clock was 20 s behind was blamed: notes were judged by the wall clock in them."""
    waiting, slow, at_work = start(0), start(1), start(2)
    off = {"behind": -20.0, "ahead": 20.0}
    for watch, other in zip((slow, at_work), off, strict=True):
        monkeypatch.setattr(watch._notes, "_boot", other)
    leave = FailureNotes.leave

    def leave_wrong(self: FailureNotes, account: str, wait: PeerWait | None, last: bool = False) -> None:
        if self._boot not in off:
            return leave(self, account, wait, last)
        note = FailureNote(time.monotonic() + off[self._boot], HOST, self._boot, account, wait, last)
        return self._store.set(f"note/{self.process}", json.dumps(note))

    monkeypatch.setattr(FailureNotes, "leave", leave_wrong)
    waits(slow, "2B0", 1)
    waits(waiting, "1B0", 0)
    time.sleep(2 * TIMEOUT)
    error = waiting.error(TIMED_OUT)
    assert f"rank 1: rank 2 on {HOST} has been silent" in str(error)
    assert isinstance(error, PeerError)
    assert "last reported at least 0.0 s ago" in error.peer_report


def test_a_wait_that_goes_on_keeps_its_beginning(start: Start) -> None:
    """0.2.0: the error of a wait that had timed out said 0 s: it was begun anew when it broke off."""
    watch = start(0)
    waits(watch, "1B0", 0)
    time.sleep(TIMEOUT)
    waits(watch, "1B0", 0)
    error = watch.error(TIMED_OUT)
    assert isinstance(error, PeerError)
    assert error.waited >= TIMEOUT


def test_the_first_reason_stays(start: Start) -> None:
    failed, other, waiting = start(2), start(1), start(0)
    failed.failed("2F3: ValueError: no")
    other.failed("1F4: ValueError: neither")
    waits(waiting, "1B0", 0)
    for cause in (CLOSED, TIMED_OUT):  # also where the process of the rank that failed lives on
        error = waiting.error(cause)
        assert isinstance(error, PeerLostError)
        assert f"rank 1: rank 2 on {HOST} failed first: 2F3: ValueError: no. " in str(error)
        assert error.peer_report.startswith("rank 2 last reported 0.")


def test_a_rank_that_died_is_named_to_those_that_lose_the_one_that_noticed(start: Start) -> None:
    one, two = start(1), start(0)
    waits(one, "2B0", 1)
    first = str(one.error(CLOSED))
    assert first.startswith("rank 1 waiting for 2B0 from rank 2: rank 2 died or closed its connection. ")
    assert "\n  rank 2 never reported" in first
    waits(two, "1B0", 0)
    assert "rank 1: rank 2 failed first: it died or closed its connection, as rank 1" in str(
        two.error(CLOSED)
    )


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """A process of this machine; no parent waits for it, so that it becomes a zombie when it ends."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


# _notes: the watch passes for that of another process
def as_process(watch: Watch, other: subprocess.Popen[bytes], on: str = "") -> None:
    """From now on the watch speaks for that process. on: its machine; this one if empty"""
    watch._notes.process_id = ProcessId(on or machine(), other.pid, began(other.pid))
    watch._leave_note()


def waited_in_vain(watch: Watch) -> PeerError:
    """For rank 1, as over NCCL, where no connection breaks."""
    with pytest.raises(PeerError) as caught:
        hold_up_until(lambda: False, Message(Op.parse("1F0"), 0), 1, watch, timedelta(seconds=4 * TIMEOUT))
    return caught.value


def test_the_notes_go_on_to_name_a_wait_that_failed(store: Store, start: Start) -> None:
    """Ranks that wait for this one follow its wait, and do not take it for the one that stalled."""

    def times_out() -> None:
        time.sleep(TIMEOUT / 4)
        raise TIMED_OUT

    struck = start(0)
    with pytest.raises(StalledPeerError), struck.waiting("1B0", 1):
        times_out()
    time.sleep(TIMEOUT / 4)
    wait = notes(store, 1).read([0])[0].wait
    assert wait is not None
    assert (wait.what, wait.peer) == ("1B0", 1)


@pytest.mark.parametrize("how", ["killed", "stopped", "killed in another container"])
def test_a_wait_that_nothing_breaks_ends_with_the_process_of_its_peer(
    start: Start, other: subprocess.Popen[bytes], how: str
) -> None:
    """0.5.0: over NCCL a killed rank was named as a silent one, and only after the timeout."""
    waiting, struck = start(0), start(1)
    as_process(struck, other, "another container" if "container" in how else "")
    other.send_signal(signal.SIGSTOP if how == "stopped" else signal.SIGKILL)
    struck._stop.set()  # its thread is gone, too
    error = waited_in_vain(waiting)
    assert f"rank 1 on {HOST}" in str(error)
    assert isinstance(error, PeerLostError if how == "killed" else StalledPeerError)


# _stop, _PATIENCE: its thread is gone, too; and a wait for the reason would be seen
def test_no_reason_is_waited_for_from_a_rank_that_was_killed(
    start: Start, other: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each restart took half a second more."""
    waiting, struck = start(0), start(1)
    as_process(struck, other)
    other.kill()
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
    struck._stop.set()
    monkeypatch.setattr(health, "_PATIENCE", 60.0)
    waits(waiting, "1B0", 1)
    error = waiting.error(CLOSED)
    assert str(error).startswith(f"rank 0 waiting for 1B0 from rank 1: rank 1 on {HOST} ")


# _pulse, _notice_deaths: one round of the thread, now
def test_a_process_that_has_closed_its_pipeline_may_end(start: Start, other: subprocess.Popen[bytes]) -> None:
    waiting, closed = start(0), start(1)
    as_process(closed, other)
    waiting._pulse.look()
    closed.close()
    other.kill()
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
    waiting._notice_deaths()
    assert not waiting.broken


def test_a_rank_that_is_silent_is_no_failure_to_one_that_times_out_itself(start: Start) -> None:
    one, two, three = start(1), start(3), start(0)
    waits(one, "2B0", 1)
    waits(two, "2F0", 3)
    waits(three, "1B0", 0)
    assert isinstance(one.error(TIMED_OUT), StalledPeerError)
    assert isinstance(two.error(TIMED_OUT), StalledPeerError)
    lost = three.error(CLOSED)
    assert isinstance(lost, PeerLostError)
    assert f"rank 1: rank 2 failed first: it has been silent for 0 s, as rank 1 on {HOST} noticed. " in str(
        lost
    )


def test_a_store_that_does_not_answer_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.5.0: a rank on the other side of a network partition sat in a call to the store for minutes."""
    silent, answers, returned = Mock(spec=Store), Event(), list[bool]()
    silent.clone.return_value = silent
    silent.check.side_effect = lambda keys: returned.append(answers.wait(60))
    monkeypatch.setattr(health, "ANSWERS", 0.2)
    watch = Watch(silent, 0, 2, TIMEOUT)
    watch.begin("1B0", 1)
    error = watch.error(TIMED_OUT)
    assert not returned
    said = r"from rank 1: rank 1 has been silent for \d+ s, longer than the timeout of 0 s; the store of"
    assert re.search(said, str(error))
    assert "this rank may be cut off" in str(error)
    watch.close()
    assert silent.check.call_count == 1
    answers.set()
