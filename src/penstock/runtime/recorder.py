"""What really ran, as the same timeline that `simulate` predicts."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from penstock.schedule import Op, Schedule, Span, Timeline


class Recorder:
    """Start and end of each op on one rank, in seconds of the clock that all ranks of the step share.

    On CUDA the times are those of the kernels on the compute stream, else those of the Python calls.
    """

    def __init__(self, device: torch.device, clock_offset: float = 0.0) -> None:
        self._cuda = device.type == "cuda"
        self._offset = clock_offset
        self._marks: list[tuple[Op, float, float]] = []
        self._events: list[tuple[Op, torch.cuda.Event, torch.cuda.Event]] = []
        self._zero: tuple[float, torch.cuda.Event] | None = None

    def begin_step(self) -> None:
        self._marks, self._events = [], []
        if self._cuda:
            self._zero = (time.perf_counter(), _event())

    def now(self) -> float | torch.cuda.Event:
        return _event() if self._cuda else time.perf_counter()

    def add(self, op: Op, start: float | torch.cuda.Event, end: float | torch.cuda.Event) -> None:
        if isinstance(start, float) and isinstance(end, float):
            self._marks.append((op, start, end))
        elif isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
            self._events.append((op, start, end))

    def marks(self) -> list[tuple[Op, float, float]]:
        """The step's ops in the order in which they ran: op, start, end."""
        if self._zero is not None:
            torch.cuda.synchronize()
            at, zero = self._zero
            self._marks = [
                (op, at + zero.elapsed_time(start) / 1e3, at + zero.elapsed_time(end) / 1e3)
                for op, start, end in self._events
            ]
        return [(op, start + self._offset, end + self._offset) for op, start, end in self._marks]


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def timeline(
    schedule: Schedule, marks: Sequence[Sequence[tuple[float, float]]], peak_live: Sequence[int]
) -> Timeline:
    """One step's timeline from each rank's (start, end) marks in program order; time 0 is the first start."""
    zero = min((start for rank in marks for start, _ in rank), default=0.0)
    spans = tuple(
        Span(rank, op, start - zero, end - zero)
        for rank, (program, times) in enumerate(zip(schedule.programs, marks, strict=True))
        for op, (start, end) in zip(program, times, strict=True)
    )
    return Timeline(schedule.name, schedule.ranks, spans, tuple(peak_live))
