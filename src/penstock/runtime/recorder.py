"""What really ran, as the same timeline that `simulate` predicts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from penstock.schedule import Op, Schedule, Span, Timeline

Mark = float | torch.cuda.Event  # a point in time


class Recorder:
    """Start and end of each op on one rank, in seconds of the clock that all ranks of the step share.

    On CUDA the times are those of the kernels on the compute stream, else those of the Python calls.
    """

    def __init__(self, device: torch.device, clock_offset: float = 0.0) -> None:
        self._cuda = device.type == "cuda"
        self._offset = clock_offset
        self._marks: list[tuple[Op, Mark, Mark]] = []
        self._zero: tuple[float, torch.cuda.Event] | None = None
        self.now: Callable[[], Mark] = _event if self._cuda else time.perf_counter

    def begin_step(self) -> None:
        self._marks = []
        if self._cuda:
            self._zero = (time.perf_counter(), _event())

    def add(self, op: Op, start: Mark, end: Mark) -> None:
        self._marks.append((op, start, end))

    def marks(self) -> list[tuple[Op, float, float]]:
        """The step's ops in the order in which they ran: op, start, end."""
        if self._cuda:
            torch.cuda.synchronize()
        return [(op, self._seconds(start), self._seconds(end)) for op, start, end in self._marks]

    def _seconds(self, mark: Mark) -> float:
        if isinstance(mark, float):
            return mark + self._offset
        assert self._zero is not None
        at, zero = self._zero
        return at + float(zero.elapsed_time(mark)) / 1e3 + self._offset


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
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
    return Timeline(schedule.name, schedule.ranks, spans, tuple(peak_live), overlaps=schedule.overlaps)
