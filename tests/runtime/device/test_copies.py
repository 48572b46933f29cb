"""The order of copies on a GPU's streams, from what is asked of torch.cuda: no GPU is needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.runtime import sharded_weights
from penstock.runtime.device import copies
from penstock.runtime.device.copies import CudaCopies, CudaLink

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


class OnGPU:
    """A weight there."""

    shape, dtype, is_cuda = (2,), torch.float32, True

    def detach(self) -> OnGPU:
        return self


def test_what_is_saved_is_copied_into_pinned_memory_and_the_host_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """0.5.0: the copies were pageable, and held up the host one by one."""
    asked: list[tuple[str, bool]] = []
    empty, weight = torch.empty, OnGPU()

    def made(*sizes: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        asked.append(("pinned", pin_memory))
        found: Tensor = empty(*sizes, **options)
        return found

    def copied(self: Tensor, other: Any, non_blocking: bool = False) -> Tensor:
        assert other is weight
        asked.append(("goes on", non_blocking))
        return self

    monkeypatch.setattr(sharded_weights, "full_tensor", lambda tensor: tensor)
    monkeypatch.setattr(torch, "empty", made)
    monkeypatch.setattr(Tensor, "copy_", copied)
    of_gpu: Any = weight
    assert sharded_weights.host_copy(of_gpu).shape == (2,)
    assert asked == [("pinned", True), ("goes on", True)]
