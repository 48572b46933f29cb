"""The stream that a rank computes on, and points in time on it.

On the CPU an op has ended when its call returns. A GPU runs later, in order, what its host has queued: a
point in time is then an event in the queue.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

from penstock.private import cuda_sleep

_CYCLES = 3e9  # per second, more than any GPU's clock: `hold` may last longer, but never shorter


class Moment(Protocol):
    """A point in a stream, such as a torch.cuda.Event. Any thread may query it.

    queued: the host's time when it had queued all work before this point
    """

    queued: float

    def query(self) -> bool:
        """Whether the stream has reached this point."""

    def synchronize(self) -> None:
        """Wait until the stream has reached this point."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from here to `end`."""


Time = float | Moment  # a point in time: seconds, or an event


class Stream(Protocol):
    """What penstock needs of a stream. runs_behind: whether the stream runs asynchronously to its host"""

    runs_behind: bool

    def begin_step(self) -> None:
        """Take the device's current stream for all points from now on."""

    def now(self) -> Time:
        """The point after all work that is queued now."""

    def anchor(self) -> tuple[float, Time]:
        """A point that the stream has just reached, and the host's time then. Waits for the stream."""

    def hold(self, seconds: float) -> None:
        """Stop the stream for at least `seconds`, so that the host can queue the next op meanwhile."""


class HostStream:
    """The CPU."""

    runs_behind = False
    now = staticmethod(time.perf_counter)  # called four times an op, so without a Python function around it

    def begin_step(self) -> None:
        """The host has one stream."""

    def anchor(self) -> tuple[float, float]:
        now = self.now()
        return now, now

    def hold(self, seconds: float) -> None:
        """Nothing: the host's stream has no queue."""


class CudaStream:
    """The current stream of one GPU, which need not be the current device."""

    runs_behind = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._current: torch.cuda.Stream | None = None  # None before the first step: the current one

    def begin_step(self) -> None:
        self._current = torch.cuda.current_stream(self._device)  # the look-up costs more than an event

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
    """Make the host wait until the stream has reached `when`."""
    if not is_over(when):
        when.synchronize()  # type: ignore[union-attr]


def seconds(start: Time, end: Time) -> float:
    """Seconds from `start` to `end`, both of which are over."""
    if isinstance(start, float):
        assert isinstance(end, float)
        return end - start
    return start.elapsed_time(end) / 1e3


class CudaMoment:
    """An event for any thread. In a new thread GPU 0 is current, and a wait would open a context there."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        """stream: of `device`; None takes its current one"""
        self._device = device
        # blocking: otherwise a wait spins
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
        return float(self._event.elapsed_time(end._event))  # torch makes the event's GPU the current one
