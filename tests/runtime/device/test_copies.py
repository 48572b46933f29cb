"""The order of copies on a GPU's streams, from what is asked of torch.cuda: no GPU is needed."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.runtime.device import copies
from penstock.runtime.device.copies import BackgroundCopies, CudaCopies, CudaLink

CPU = torch.device("cpu")


class Log:
    """What is queued, and on which stream."""

    def __init__(self) -> None:
        self.entries: list[str] = []
        self.current = Stream(self, "compute")
        self.names = iter(("downs", "ups"))

    def make(self, device: torch.device) -> Stream:
        return Stream(self, next(self.names))

    @contextmanager
    def on(self, inner: Stream) -> Iterator[None]:
        before, self.current = self.current, inner
        yield
        self.current = before

    def add(self, what: str) -> None:
        self.entries.append(f"{self.current.name}: {what}")


class Stream:
    def __init__(self, log: Log, name: str) -> None:
        self._log, self.name = log, name

    def wait_stream(self, other: Stream) -> None:
        self._log.entries.append(f"{self.name}: wait for {other.name}")

    def wait_event(self, event: Event) -> None:
        self._log.entries.append(f"{self.name}: wait for the event of {event.name}")


class Event:
    name = "nothing"

    def record(self, of: Stream) -> None:
        self.name = of.name


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    made, copy, to = Log(), Tensor.copy_, Tensor.to

    def copied(self: Tensor, other: Tensor, non_blocking: bool = False) -> Tensor:
        assert non_blocking, "the host would wait"
        made.add("copy")
        return copy(self, other)

    def moved(self: Tensor, device: Any, non_blocking: bool = False) -> Tensor:
        assert non_blocking, "the host would wait"
        made.add("copy")
        return to(self, device, copy=True)

    def moment(device: torch.device) -> object:
        made.add("moment")
        return object()

    monkeypatch.setattr(torch.cuda, "Stream", made.make)
    monkeypatch.setattr(torch.cuda, "stream", made.on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: made.current)
    monkeypatch.setattr(copies, "CudaMoment", moment)
    monkeypatch.setattr(Tensor, "copy_", copied)
    monkeypatch.setattr(Tensor, "to", moved)
    monkeypatch.setattr(Tensor, "record_stream", lambda self, of: made.add(f"memory is used on {of.name}"))
    return made


def test_what_goes_down_is_copied_once_it_is_computed_and_kept_until_then(log: Log) -> None:
    host = torch.zeros(2)
    copies.CudaCopies(CPU).down([torch.ones(2)], [host])
    assert host.tolist() == [1, 1]
    assert log.entries == [
        "downs: wait for compute",
        "downs: copy",
        "downs: memory is used on downs",
        "downs: moment",
    ]


def test_what_was_made_before_goes_down_while_the_compute_stream_goes_on(log: Log) -> None:
    """A wait would be for all that the host has queued since: the copies would come after the next step."""
    down = copies.CudaCopies(CPU).down
    down([], [])
    log.add("an op")
    down([torch.ones(2)], [torch.zeros(2)], made=True)
    assert log.entries == [
        "downs: wait for compute",
        "downs: moment",
        "compute: an op",
        "downs: copy",
        "downs: memory is used on downs",
        "downs: moment",
    ]


def test_what_comes_up_does_not_wait_for_what_is_computed(log: Log) -> None:
    (made,), _ = CudaCopies(CPU).up([torch.ones(2)])
    assert made.tolist() == [1, 1]
    assert log.entries == [
        "ups: copy",
        "ups: moment",
        "compute: wait for ups",
        "compute: memory is used on compute",
    ]


def test_memory_of_the_compute_stream_is_filled_between_what_uses_it(log: Log) -> None:
    into = torch.zeros(2)
    CudaCopies(CPU).fill(into, torch.ones(2))
    assert into.tolist() == [1, 1]
    assert log.entries == [
        "ups: wait for compute",
        "ups: copy",
        "ups: moment",
        "compute: wait for ups",
    ]


def test_offloaded_memory_is_copied_meanwhile_and_the_compute_stream_waits_when_asked(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No memory is marked as used on another stream: a host that is far ahead would free it too late."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    link, here, host = CudaLink(CPU), torch.ones(2), torch.zeros(2)
    down = link.down([here], [host])
    log.add("an op")
    link.wait(down)
    assert host.tolist() == [1, 1]
    back = torch.zeros(2)
    up = link.up([host], [back])
    log.add("another op")
    link.wait(up)
    assert back.tolist() == [1, 1]
    assert log.entries == [
        "downs: wait for compute",
        "downs: copy",
        "compute: an op",
        "compute: wait for the event of downs",
        "ups: wait for compute",
        "ups: copy",
        "compute: another op",
        "compute: wait for the event of ups",
    ]


class Arriving:
    """Copies from a device that arrive when they are waited for. pinned: the memory they came by"""

    def __init__(self) -> None:
        self.pinned: set[int] = set()
        self.copied = 0

    def down(self, tensors: Sequence[Tensor], hosts: Sequence[Tensor], *, made: bool = False) -> Any:
        self.pinned |= {host.data_ptr() for host in hosts if host.nbytes}
        for host in hosts:
            host.fill_(0xFF)

        def synchronize() -> None:
            for tensor, host in zip(tensors, hosts, strict=True):
                self.copied += tensor.nbytes
                host.copy_(tensor)

        return SimpleNamespace(query=lambda: False, synchronize=synchronize)

    up: Any = None
    fill: Any = None


HELD = [torch.arange(10_000), torch.arange(6.0).view(2, 3).t(), torch.tensor(2.5), torch.empty(0, 4)]


# _PINNED, _is_on_host: small pieces, and the host stands for a GPU
@pytest.mark.parametrize("later", [False, True])
def test_bytes_come_by_a_few_pinned_pieces_each_once(monkeypatch: pytest.MonkeyPatch, later: bool) -> None:
    monkeypatch.setattr(copies, "PIECE", 1 << 10)
    monkeypatch.setattr(copies, "_PINNED", 3)
    monkeypatch.setattr(copies, "_is_on_host", lambda tensor: False)
    device = Arriving()
    made = BackgroundCopies(device, pinned=False)
    hosts = [made.later(tensor) if later else made.now(tensor) for tensor in HELD]
    made.begin()
    made.result()
    for tensor, host in zip(HELD, hosts, strict=True):
        torch.testing.assert_close(host, tensor, rtol=0, atol=0)
        assert host.is_contiguous()
    assert device.copied == sum(tensor.nbytes for tensor in HELD)
    assert not later or len(device.pinned) <= 3 + 1  # of the transposed one, which is copied at once
    assert not [thread for thread in threading.enumerate() if thread.name == "penstock-piece"]


def test_a_process_that_keeps_nothing_copies_nothing() -> None:
    made = BackgroundCopies(Arriving(), kept=False)
    assert made.now(HELD[0]).nbytes == made.later(HELD[0]).nbytes == 0
    made.begin()
    made.result()


# _is_on_host: the host stands for a GPU
def test_pieces_are_pinned_where_the_device_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    empty = torch.empty

    def noted(*sizes: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        asked.append(pin_memory)
        made: Tensor = empty(*sizes, **options)
        return made

    monkeypatch.setattr(copies, "CudaCopies", lambda device: Arriving())
    monkeypatch.setattr(copies, "_is_on_host", lambda tensor: False)
    monkeypatch.setattr(torch, "empty", noted)
    made = copies.background_copies(torch.device("cuda")).now(torch.ones(3))
    assert made.tolist() == [1, 1, 1]
    assert asked == [False, True]  # the copy, then a piece
