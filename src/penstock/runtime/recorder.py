"""What really ran, as the same timeline that `simulate` predicts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import NamedTuple

import torch

from penstock.schedule import Op, Reduction, Schedule, Span, Timeline, Wait

Mark = float | torch.cuda.Event  # a point in time


class Marks(NamedTuple):
    """Of one op, in seconds; the wait is empty where it waited for nothing."""

    start: float
    end: float
    waited_from: float
    waited_to: float


class Recorder:
    """When each op of one rank began and ended, from when to when the rank waited for its input, and when it
    summed a stage's gradients over the ranks beside the pipeline, in seconds of the clock that all ranks of
    the step share.

    On CUDA the times are those of the kernels on the compute stream, else those of the Python calls.
    """

    def __init__(self, device: torch.device, clock_offset: float = 0.0) -> None:
        self.device, self._cuda = device, device.type == "cuda"
        self._offset = clock_offset
        self._done: list[Op] = []
        self._marks: list[Mark] = []  # of each op that is done: start, end, start and end of its wait
        self._waited: dict[Op, tuple[Mark, Mark]] = {}  # by what was waited for
        self._reduced: dict[int, tuple[Mark, Mark]] = {}  # by stage
        self._zero: tuple[float, torch.cuda.Event] | None = None
        self.now: Callable[[], Mark] = _event if self._cuda else time.perf_counter

    def begin_step(self) -> None:
        self._done, self._marks, self._waited, self._reduced = [], [], {}, {}
        if self._cuda:
            self._zero = (time.perf_counter(), _event())

    def waited(self, made: Op, start: Mark, end: Mark) -> None:
        """For the result of `made`."""
        self._waited[made] = start, end

    def add(self, op: Op, takes: Op | None, start: Mark, end: Mark) -> None:
        """In the order of the program. takes: what it took from another stage"""
        waited = self._waited.pop(takes, None) if takes is not None else None
        self._done.append(op)
        self._marks += (start, end, *(waited or (start, start)))

    def reduced(self, stage: int, start: Mark, end: Mark) -> None:
        """The gradients of `stage` were summed over the ranks beside the pipeline."""
        self._reduced[stage] = start, end

    @property
    def done(self) -> list[Op]:
        """The step's ops so far, in the order in which they ran."""
        return list(self._done)

    def times(self) -> list[float]:
        """The fields of each op's Marks, one op after the other."""
        if self._cuda:
            torch.cuda.synchronize()
            return list(map(self._seconds, self._marks))
        offset = self._offset
        return [mark + offset for mark in self._marks]  # type: ignore[operator]

    def reductions(self) -> dict[int, tuple[float, float]]:
        """Start and end of each, by stage; call `times` first."""
        return {stage: (self._seconds(a), self._seconds(b)) for stage, (a, b) in self._reduced.items()}

    def ended(self) -> list[tuple[Op, Marks]]:
        """Those of ops that have ended, without waiting: in a step that failed a kernel may never end."""
        each = zip(*[iter(self._marks)] * len(Marks._fields), strict=False)
        over = takewhile(lambda of: _is_over(of[1][1]), zip(self._done, each, strict=False))
        return [(op, Marks(*map(self._seconds, times))) for op, times in over]

    def _seconds(self, mark: Mark) -> float:
        if isinstance(mark, float):
            return mark + self._offset
        assert self._zero is not None
        at, zero = self._zero
        return at + float(zero.elapsed_time(mark)) / 1e3 + self._offset


def _is_over(mark: Mark) -> bool:
    return isinstance(mark, float) or mark.query()  # type: ignore[no-untyped-call]


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def timeline(
    schedule: Schedule,
    marks: Sequence[Sequence[tuple[Op, Marks]]],
    peak_live: Sequence[int],
    reductions: Sequence[Reduction] = (),
) -> Timeline:
    """One step's timeline from what each rank's recorder has; time 0 is the first start.

    Of a step that did not end, as far as it came: the wait for an op whose input's end is unknown is left
    out.
    """
    zero = min((of.start for rank in marks for _, of in rank), default=0.0)
    ends = {op: of.end for rank in marks for op, of in rank}
    spans, waits = [], []
    for rank, known in enumerate(marks):
        for op, of in known:
            spans.append(Span(rank, op, of.start - zero, of.end - zero))
            sent = [ends[n] for n in schedule.predecessors(op) if n.stage != op.stage and n in ends]
            if of.waited_to > of.waited_from and sent:
                waits.append(Wait(rank, op, of.waited_from - zero, of.waited_to - zero, sent[0] - zero))
    return Timeline(
        schedule.name,
        schedule.ranks,
        tuple(spans),
        tuple(peak_live),
        overlaps=schedule.overlaps,
        waits=tuple(waits),
        reductions=tuple(of._replace(start=of.start - zero, end=of.end - zero) for of in reductions),
    )
