"""The stream that a rank computes on: where it is, as the rank's host sees it.

On the CPU an op has ended when its call returns. A GPU runs later, in order, what its host has queued: a
point in time is then a mark in the queue.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch


class Moment(Protocol):
    """A point in a stream, such as a torch.cuda.Event. Any thread may ask for it."""

    def query(self) -> bool:
        """Whether the stream has come there."""

    def synchronize(self) -> None:
        """Wait until it has."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from here to `end`."""


Time = float | Moment  # a point in time: seconds, or a mark


class Stream(Protocol):
    """What penstock needs of a stream. runs_behind: whether the host goes on while it computes"""

    runs_behind: bool

    def now(self) -> Time:
        """The point that the stream has come to, or comes to after all that is queued."""

    def synchronize(self) -> None:
        """Wait until everything queued has run."""


class HostStream:
    """The CPU."""

    runs_behind = False
    now = staticmethod(time.perf_counter)  # four times an op: without a call in between

    def synchronize(self) -> None:
        """Everything has run."""


class CudaStream:
    """The current stream of a GPU, whatever GPU is the current one."""

    runs_behind = True

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> Moment:
        return _CudaMoment(self._device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)


def stream_of(device: torch.device) -> Stream:
    return CudaStream(device) if device.type == "cuda" else HostStream()


class _CudaMoment:
    """A new thread is on GPU 0 whatever its process computes on; by waiting it would open a context there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            # blocking: a wait spins else
            self._event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
            self._event.record()

    def query(self) -> bool:
        with torch.cuda.device(self._device):
            return bool(self._event.query())  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        with torch.cuda.device(self._device):
            self._event.synchronize()

    def elapsed_time(self, end: Any) -> float:
        with torch.cuda.device(self._device):
            return float(self._event.elapsed_time(end._event))
