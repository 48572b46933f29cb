"""Emulated links between a device and host memory: both memories are the CPU's.

What a copy writes holds NaN until the copy runs, and what it read is spoilt once its wait is over. So a user
that comes too early, or too late, finds wrong numbers.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock import Axes
from penstock.pipeline.building import stages
from penstock.runtime.device.footprints import is_held_elsewhere
from penstock.runtime.device.offload import Offload
from support.mesh import exact_steps

_NAN = 0xFF  # as every byte of a number


class LateLink:
    """Nothing is copied before it is waited for. log: what was asked, in order"""

    def __init__(self, log: list[str] | None = None) -> None:
        self.log: list[str] = [] if log is None else log

    def down(self, tensors: Sequence[Tensor], hosts: Sequence[Tensor]) -> Any:
        return self._later("down", tensors, hosts)

    def up(self, hosts: Sequence[Tensor], tensors: Sequence[Tensor]) -> Any:
        return self._later("up", hosts, tensors)

    def _later(self, way: str, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Any:
        self.log.append(way)
        for target in targets:
            target.fill_(_NAN)
        return way, list(zip(sources, targets, strict=True))

    def wait(self, copied: Any) -> None:
        way, pairs = copied
        self.log.append(f"wait {way}")
        for source, target in pairs:
            target.copy_(source)
            if not is_held_elsewhere(source):  # as a result that is still being sent
                source.fill_(_NAN)


class OpCount:
    """How many ops have begun. Any thread may wait for the next one."""

    def __init__(self) -> None:
        self._changed, self.begun = threading.Condition(), 0

    def begin(self) -> None:
        with self._changed:
            self.begun += 1
            self._changed.notify_all()

    def wait_beyond(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.begun > count, timeout=60), "no op begins"


class SlowLink:
    """A thread for each direction, which takes its time: `bandwidth` bytes a second.

    ops: a copy ends no sooner than the next op has begun
    copied: how many calls of each direction are over
    """

    def __init__(self, bandwidth: float, ops: OpCount) -> None:
        self._bandwidth, self._ops = bandwidth, ops
        self.copied = {"down": 0, "up": 0}
        self._queues = {way: queue.SimpleQueue[Any]() for way in self.copied}
        for way in self.copied:
            threading.Thread(target=self._serve, args=(way,), daemon=True).start()

    def down(self, tensors: Sequence[Tensor], hosts: Sequence[Tensor]) -> Any:
        return self._queue("down", tensors, hosts)

    def up(self, hosts: Sequence[Tensor], tensors: Sequence[Tensor]) -> Any:
        return self._queue("up", hosts, tensors)

    def wait(self, copied: Any) -> None:
        assert copied.wait(60), "a copy does not end"

    def _queue(self, way: str, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> threading.Event:
        over = threading.Event()
        for target in targets:
            target.fill_(_NAN)
        self._queues[way].put((list(sources), list(targets), self._ops.begun, over))
        return over

    def _serve(self, way: str) -> None:
        while True:
            sources, targets, begun, over = self._queues[way].get()
            time.sleep(sum(source.nbytes for source in sources) / self._bandwidth)
            self._ops.wait_beyond(begun)
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source)
            self.copied[way] += 1
            del sources, targets
            over.set()


def exact_in_a_late_link(family: str, ranks: int, axes: Axes, schedule: Any, options: dict[str, Any]) -> int:
    """`support.mesh.exact_steps`, whose stages have LateLinks. Returns how many copies came back."""
    links: list[LateLink] = []

    def link() -> LateLink:
        links.append(LateLink())
        return links[-1]

    with pytest.MonkeyPatch.context() as patch:
        use_link(patch, link)
        exact_steps(family, ranks, axes, schedule, options)
    return sum(each.log.count("wait up") for each in links)


def use_link(patch: pytest.MonkeyPatch, make: Callable[[], Any]) -> None:
    """Stages that are built from now on get their link from `make`."""

    def offload(device: torch.device, least: int) -> Offload:
        return Offload(device, least, make())

    patch.setattr(stages, "Offload", offload)
