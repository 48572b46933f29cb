"""Memory that processes share: words that are waited for, and what a wait says when nothing will come."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import timedelta
from threading import Timer

import pytest
import torch

from penstock.runtime.shared_memory import segment as shared
from penstock.runtime.shared_memory.segment import BLOCKS, GATHERED, Segment
from support.pool import start

SOON = timedelta(seconds=30)


# _create and _open are the two halves of `meet`, here in one process
def segment(maker: int | None = None) -> Segment:
    """A new one, as if the process `maker` had made it."""
    descriptor = shared._create(token=7)
    try:
        return Segment(descriptor, os.getpid() if maker is None else maker)
    finally:
        os.close(descriptor)


@pytest.fixture
def own() -> Iterator[Segment]:
    made = segment()
    yield made
    made.close()


@pytest.mark.parametrize("spin", [False, True])
def test_a_wait_ends_with_the_announcement(own: Segment, spin: bool) -> None:
    own.announce(GATHERED, 3)
    own.wait(GATHERED, 3, SOON, spin)  # at once
    later = Timer(0.1, own.announce, (GATHERED, 5))
    later.start()
    own.wait(GATHERED, 5, SOON, spin)
    later.join()
    assert own.words[GATHERED] == 5


def test_a_wait_that_takes_too_long_times_out(own: Segment) -> None:
    with pytest.raises(RuntimeError, match="timed out"):
        own.wait(GATHERED, 1, timedelta(seconds=0.01), spin=False)


def test_a_wait_for_a_process_that_has_ended_its_work(own: Segment) -> None:
    own.end()
    with pytest.raises(RuntimeError, match="connection closed"):
        own.wait(GATHERED, 1, SOON, spin=False)
    own.announce(GATHERED, 1)  # what came before its end counts
    own.wait(GATHERED, 1, SOON, spin=False)


def test_a_wait_for_a_process_that_is_killed() -> None:
    process = start(time.sleep, 60)
    waited = segment(process.pid)
    Timer(0.1, process.kill).start()
    with pytest.raises(RuntimeError, match="connection closed"):
        waited.wait(GATHERED, 1, SOON, spin=False)
    process.join()
    waited.close()


# _create: its descriptor tells how much memory there is
def test_memory_comes_when_it_is_touched_and_goes_when_it_is_freed() -> None:
    descriptor = shared._create(token=7)
    own = Segment(descriptor, os.getpid())
    assert own.nbytes > 1 << 36
    before = os.fstat(descriptor).st_blocks
    own.tensor(BLOCKS, (1 << 20,), torch.uint8).fill_(1)
    assert os.fstat(descriptor).st_blocks - before == (1 << 20) // 512
    own.free(BLOCKS, 1 << 20)
    assert os.fstat(descriptor).st_blocks == before
    assert not own.tensor(BLOCKS, (1 << 20,), torch.uint8).any()
    os.close(descriptor)
    own.close()


# _create and _open, here in one process
def test_a_segment_of_another_host_is_not_taken_for_ones_own() -> None:
    """There its process and descriptor may be anything here."""
    descriptor = shared._create(token=7)
    here = (os.getpid(), descriptor, 7)
    opened = shared._open([here])
    assert opened is not None
    opened[0].close()
    with open(os.devnull) as other:
        for elsewhere in ((*here[:2], 8), (here[0], other.fileno(), 7), (2**22 + 1, descriptor, 7)):
            assert shared._open([here, elsewhere]) is None
    os.close(descriptor)


def test_a_closed_segment_keeps_what_tensors_hold() -> None:
    made = segment()
    kept = made.tensor(BLOCKS, (4,), torch.int64)
    kept.copy_(torch.arange(4))
    made.close()
    made.close()  # twice is no harm
    del made
    assert kept.tolist() == [0, 1, 2, 3]


# _create and _open, here in one process
@pytest.mark.parametrize("missing", ["memfd_create", "pidfd_open"])
def test_a_python_without_all_functions_has_no_segment(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """Such as one that was built for an old system."""
    descriptor = shared._create(token=7)
    monkeypatch.delattr(os, missing)
    if missing == "memfd_create":
        assert shared._create(token=7) == -1
    assert (shared._open([(os.getpid(), descriptor, 7)]) is None) == (missing == "pidfd_open")
    os.close(descriptor)


# _create and _open, here in one process
def test_a_sandbox_that_frees_no_shared_memory_has_no_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Segment, at: int, nbytes: int) -> None:
        raise OSError(38, "Function not implemented")

    descriptor = shared._create(token=7)
    monkeypatch.setattr(Segment, "free", refuse)
    assert shared._open([(os.getpid(), descriptor, 7)]) is None
    os.close(descriptor)


def test_a_wait_sees_the_end_of_a_process_that_it_does_not_wait_for_yet(own: Segment) -> None:
    other = segment()
    other.end()
    with pytest.raises(RuntimeError, match="connection closed"):
        own.wait(GATHERED, 1, SOON, False, [other])
    other.announce(GATHERED, 1)  # it had nothing more to say
    with pytest.raises(RuntimeError, match="timed out"):
        own.wait(GATHERED, 1, timedelta(seconds=0.1), False, [other])
    other.close()


# _futex: a wait that ends at a chosen moment
def test_a_word_that_came_just_before_the_end_counts(own: Segment, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(self: Segment, word: int, op: int, value: int, pause: object) -> int:
        self.words[word] = 1  # while this one sleeps its peer says its last word and ends
        self.end()
        return -1

    monkeypatch.setattr(Segment, "_futex", slow)
    own.wait(GATHERED, 1, SOON, spin=False)


def test_a_dropped_segment_leaves_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        segment()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_users_default_device_is_not_taken(own: Segment) -> None:
    with torch.device("meta"):
        assert own.tensor(BLOCKS, (2,), torch.float32).device.type == "cpu"
        assert own.separate(BLOCKS, (0, 3), torch.float32).shape == (0, 3)
