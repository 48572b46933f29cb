"""The stream that a rank computes on: where it is, as the rank's host sees it.

On the CPU an op has ended when its call returns. A GPU runs later, in order, what its host has queued: a
point in time is then a mark in the queue.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

from penstock.private import cuda_sleep

_CYCLES = 3e9  # in a second, more than any GPU's clock has: `hold` may last longer, and never shorter


class Moment(Protocol):
    """A point in a stream, such as a torch.cuda.Event. Any thread may ask for it.

    queued: the host's time when it had queued all that is in front of it
    """

    queued: float

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

    def begin_step(self) -> None:
        """From now on points are of the stream that is the current one now."""

    def now(self) -> Time:
        """The point that the stream has come to, or comes to after all that is queued."""

    def anchor(self) -> tuple[float, Time]:
        """A point that the stream has just come to, and the host's time then. Waits until it has."""

    def hold(self, seconds: float) -> None:
        """Let the stream stand still for so long at least, so that the host can queue what comes next."""


class HostStream:
    """The CPU."""

    runs_behind = False
    now = staticmethod(time.perf_counter)  # four times an op: without a call in between

    def begin_step(self) -> None:
        """There is one."""

    def anchor(self) -> tuple[float, float]:
        now = self.now()
        return now, now

    def hold(self, seconds: float) -> None:
        """It computes what its host calls, when its host calls it."""


class CudaStream:
    """The current stream of a GPU, whatever GPU is the current one."""

    runs_behind = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._current: torch.cuda.Stream | None = None  # until the first step, whichever is the current one

    def begin_step(self) -> None:
        self._current = torch.cuda.current_stream(self._device)  # to ask for it costs more than a mark

    def now(self) -> Moment:
        return CudaMoment(self._device, self._current)

    def anchor(self) -> tuple[float, Moment]:
        moment = self.now()
        while not moment.query():  # a host that sleeps would wake up too late to know when
            pass
        return time.perf_counter(), moment

    def hold(self, seconds: float) -> None:
        with torch.cuda.stream(self._current):
            cuda_sleep(int(seconds * _CYCLES))  # type: ignore[no-untyped-call]


def stream_of(device: torch.device) -> Stream:
    return CudaStream(device) if device.type == "cuda" else HostStream()


def is_over(when: Time) -> bool:
    return isinstance(when, float) or when.query()


def reach(when: Time) -> None:
    """Hold up the host until the stream has come there."""
    if not is_over(when):
        when.synchronize()  # type: ignore[union-attr]


def seconds(start: Time, end: Time) -> float:
    """From `start` to `end`, both of which are over."""
    if isinstance(start, float):
        assert isinstance(end, float)
        return end - start
    return start.elapsed_time(end) / 1e3


class CudaMoment:
    """A new thread is on GPU 0 whatever its process computes on; by waiting it would open a context there."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        """stream: one of that GPU; None takes the current one"""
        self._device = device
        # blocking: a wait spins else
        self._event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(device) if stream is None else stream)
        self.queued = time.perf_counter()

    def query(self) -> bool:
        with torch.cuda.device(self._device):
            return bool(self._event.query())  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        with torch.cuda.device(self._device):
            self._event.synchronize()

    def elapsed_time(self, end: Any) -> float:
        with torch.cuda.device(self._device):
            return float(self._event.elapsed_time(end._event))
