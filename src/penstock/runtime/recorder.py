"""The record of one rank's step: how far it is in its program, and when each op ran.

The timeline, the bubble, the account in an error and the post-mortem all come from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple

import torch

from penstock.errors import Account
from penstock.runtime.device import stream
from penstock.runtime.device.stream import Time
from penstock.schedule import Op, Reduction, Schedule, Span, Timeline, Wait

_SHOWN = 3  # ops named as the last ones done


class OpTimes(NamedTuple):
    """When one op ran, and when its rank waited for its input (empty if it did not), in seconds."""

    start: float
    end: float
    waited_from: float
    waited_to: float


class Recorder:
    """When each op of one rank started and ended, when the rank waited, and when it reduced gradients.

    Times are seconds of the clock that all ranks of the step share. On CUDA they are those of the kernels
    on the compute stream, else those of the Python calls. A GPU has a clock of its own, and its stream may be
    far behind its host: so the two are related at the end of each step, by a point that the stream comes to
    while the host looks on.

    Args:
        clock_offset: seconds to add to this process's clock to get rank 0's.
    """

    def __init__(self, device: torch.device, clock_offset: float = 0.0) -> None:
        self.device, self._stream = device, stream.stream_of(device)
        self._offset = clock_offset
        self.program: Sequence[Op] = ()  # of the step that is recorded
        self._done: list[Op] = []
        self._times: list[Time] = []  # four of each op that is done, as OpTimes has them
        self._waited: dict[Op, tuple[Time, Time]] = {}  # by the op whose result was waited for
        self._reduced: dict[int, tuple[Time, Time]] = {}  # by stage
        # the host's time at a point of the stream; this one is for a first step that fails
        self._anchor = self._stream.anchor()
        self.now = self._stream.now

    def begin_step(self, program: Sequence[Op] = ()) -> None:
        self.program = program
        self._stream.begin_step()
        self._done, self._times, self._waited, self._reduced = [], [], {}, {}

    def waited(self, source: Op, start: Time, end: Time) -> None:
        """The rank waited for the result of `source`."""
        self._waited[source] = start, end

    def add(self, op: Op, takes: Op | None, start: Time, end: Time) -> None:
        """`op` has run, on the result of `takes`. Called in program order."""
        waited = self._waited.pop(takes, None) if takes is not None else None
        self._done.append(op)
        self._times += (start, end, *(waited or (start, start)))

    def reduced(self, stage: int, start: Time, end: Time) -> None:
        """The gradients of `stage` were summed over the mesh."""
        self._reduced[stage] = start, end

    @property
    def done(self) -> list[Op]:
        """The step's ops so far, in the order in which they ran."""
        return list(self._done)

    def times(self) -> list[float]:
        """The OpTimes of all ops, flat. Waits until they have ended."""
        if self._stream.runs_behind:
            ends = [*self._times[-3:-2], *(end for _, end in self._reduced.values())]
            for end in ends:  # with nothing left to do, the stream comes to the anchor at once
                stream.reach(end)
            self._anchor = self._stream.anchor()
            return list(map(self._seconds, self._times))
        offset = self._offset
        return [when + offset for when in self._times]  # type: ignore[operator]

    def reductions(self) -> dict[int, tuple[float, float]]:
        """Start and end of each reduction, by stage; call `times` first."""
        return {stage: (self._seconds(a), self._seconds(b)) for stage, (a, b) in self._reduced.items()}

    def ended(self) -> list[tuple[Op, OpTimes]]:
        """The ops that have ended, without waiting: in a failed step a kernel may never end."""
        each = zip(*[iter(self._times)] * len(OpTimes._fields), strict=False)
        over = takewhile(lambda ran: stream.is_over(ran[1][1]), zip(self._done, each, strict=False))
        return [(op, OpTimes(*map(self._seconds, times))) for op, times in over]

    def _seconds(self, when: Time) -> float:
        if isinstance(when, float):
            return when + self._offset
        at, anchor = self._anchor
        return at + stream.seconds(anchor, when) + self._offset


def timeline(
    schedule: Schedule,
    ran: Sequence[Sequence[tuple[Op, OpTimes]]],
    peak_live: Sequence[int],
    reductions: Sequence[Reduction] = (),
    zero: float | None = None,
) -> Timeline:
    """The timeline of one step, complete or cut short.

    Args:
        ran: by rank, the ops that have ended.
        zero: seconds of the shared clock that become time 0; None takes the first start.
    """
    if zero is None:
        zero = min((times.start for rank in ran for _, times in rank), default=0.0)
    ends = {op: times.end for rank in ran for op, times in rank}
    spans, waits = [], []
    for rank, ops in enumerate(ran):
        for op, (start, end, waited_from, waited_to) in ops:
            spans.append(Span(rank, op, start - zero, end - zero))
            sent = [ends[n] for n in schedule.predecessors(op) if n.stage != op.stage and n in ends]
            if waited_to > waited_from and sent:
                waits.append(Wait(rank, op, waited_from - zero, waited_to - zero, sent[0] - zero))
    return Timeline(
        schedule.name,
        schedule.ranks,
        tuple(spans),
        tuple(peak_live),
        overlaps=schedule.overlaps,
        waits=tuple(waits),
        reductions=tuple(each._replace(start=each.start - zero, end=each.end - zero) for each in reductions),
    )


class Progress(NamedTuple):
    """How far one rank is in a step. Any thread may read it at any time: it is made of two attributes.

    program: the ops of a step; done: those that have run so far; current: the one that runs now. On CUDA an
        op counts as done when its kernels have been launched.
    """

    program: Sequence[Op]
    done: Sequence[Op]
    current: Op | None

    @property
    def last_ops(self) -> tuple[Op, ...]:
        return tuple(self.done[-_SHOWN:])

    @property
    def over(self) -> bool:
        return len(self.done) >= len(self.program)

    @property
    def phase(self) -> str:
        """Warm-up until the first backward, drain after the last forward, steady in between."""
        backwards = [place for place, op in enumerate(self.program) if op.kind != "F"]
        forwards = [place for place, op in enumerate(self.program) if op.kind == "F"]
        if self.over or not backwards:
            return ""
        if len(self.done) < backwards[0]:
            return "warm-up"
        return "drain" if not forwards or len(self.done) > forwards[-1] else "steady phase"


def account(progress: Progress | None, waiting: str = "") -> Account:
    """The progress in words.

    Args:
        progress: None before the first step.
        waiting: e.g. ``waiting for 2B0 from rank 2``.
    """
    if progress is None:
        return Account(f"{waiting or 'at work'}, before the first step")
    if progress.current is not None:
        doing = f"in {progress.current}"
    elif waiting:
        doing = waiting
    else:
        doing = "between steps" if progress.over else f"before {progress.program[len(progress.done)]}"
    last = " ".join(map(str, progress.last_ops))
    done = f"{len(progress.done)} of {len(progress.program)} ops done"
    return Account(
        ", ".join(filter(None, (doing, progress.phase))), f"{done}, the last {last}" if last else done
    )
