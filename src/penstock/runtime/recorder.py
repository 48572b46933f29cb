"""The record of one rank's step: how far it is in its program, and when each op ran.

The timeline, the bubble, the position in an error and the post-mortem all come from it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import takewhile
from math import nan
from statistics import median
from typing import NamedTuple, cast

import torch

from penstock.errors import FailurePoint
from penstock.runtime.device import stream
from penstock.runtime.device.stream import Time
from penstock.schedule import DeviceTime, Op, Reduction, Schedule, Span, Timeline, Wait
from penstock.schedule.ops import Kind

_SHOWN = 3  # ops named as the last ones done
_HOLD = 1.25  # times the host's last launch time of an op, as the next launch may be slower
_LONGEST_HOLD = 1.0  # seconds: last time the op may have compiled its layers
_ROUNDING = 1e-5  # seconds: CUDA gives times in float32
_StageKind = tuple[int, Kind]
_Seconds = dict[_StageKind, float]


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
    far behind its host: so the two clocks are aligned at the end of each step, at a point that the stream
    reaches while the host polls it.

    An op's time on a GPU has gaps where the GPU waits for its host to launch the rest of the op. It has none
    where the GPU began the op after its host had launched all of it: such an op shows the GPU's time for ops
    of its stage and kind, from which the gaps of the others follow.

    Args:
        clock_offset: seconds to add to this process's clock to get rank 0's.

    Attributes:
        holds_back: whether to stop the stream before each op until the host has launched it
        device_times: seconds that the GPU takes for an op, by stage and kind, as far as they are known
        host_bound: seconds that the GPU waited for its host within the ops of the last step; NaN where ops
            have gaps of unknown length, and on the CPU
    """

    def __init__(self, device: torch.device, clock_offset: float = 0.0) -> None:
        self.device, self._stream = device, stream.stream_of(device)
        self._offset = clock_offset
        self.program: Sequence[Op] = ()  # of the step that is recorded
        self._done: list[Op] = []
        self._times: list[Time] = []  # four for each op that has run, in the order of OpTimes
        self._waited: dict[Op, Time] = {}  # since when, by the op whose result was waited for
        self._reduced: dict[int, tuple[Time, Time]] = {}  # by stage
        # the host's time at a point of the stream; here, for a first step that fails
        self._anchor = self._stream.anchor()
        self.now, self.runs_behind = self._stream.now, self._stream.runs_behind
        self.holds_back = False
        self._by_program: defaultdict[tuple[int, str], tuple[_Seconds, _Seconds]]
        self._by_program = defaultdict(lambda: ({}, {}))
        self.host_bound = nan

    def begin_step(self, program: Sequence[Op] = ()) -> None:
        self.program = program
        # with other microbatches, and in forwards without a backward, an op takes another time
        size_and_kind = len(program), program[-1].kind if program else ""
        self.device_times, self._launching = self._by_program[size_and_kind]
        self._stream.begin_step()
        self._done, self._times, self._waited, self._reduced = [], [], {}, {}

    def waited(self, source: Op, start: Time) -> None:
        """The rank waited for the result of `source`, until the op that takes it began."""
        self._waited[source] = start

    def add(self, op: Op, takes: Op | None, start: Time, end: Time) -> None:
        """`op` has run, on the result of `takes`. Called in program order."""
        waited = start if takes is None else self._waited.pop(takes, start)
        self._done.append(op)
        self._times += (start, end, waited, start)

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
            for end in ends:  # so that the stream has no work left before the anchor
                stream.reach(end)
            self._anchor = self._stream.anchor()
            points = dict(zip(map(id, self._times), self._times, strict=True))  # an op has up to three
            seconds = {key: self._seconds(when) for key, when in points.items()}
            times = [seconds[id(when)] for when in self._times]
            self._find_gaps(times)
            return times
        offset = self._offset
        return [when + offset for when in self._times]  # type: ignore[operator]

    def hold_back(self, op: Op) -> None:
        """Stop the stream until the host has launched the op, if the host is as fast as last time."""
        self._stream.hold(min(_LONGEST_HOLD, _HOLD * self._launching.get((op.stage, op.kind), 0.0)))

    def _find_gaps(self, times: Sequence[float]) -> None:
        """Find the GPU's time for each stage and kind, and from it `host_bound`."""
        starts, ends, marks = times[::4], times[1::4], cast(list[stream.Moment], self._times)
        whole: defaultdict[_StageKind, list[float]] = defaultdict(list)
        gapped: list[tuple[_StageKind, float]] = []
        for at, (op, start, end) in enumerate(zip(self._done, starts, ends, strict=True)):
            key, launched = (op.stage, op.kind), marks[4 * at + 1].queued
            self._launching[key] = launched - marks[4 * at].queued
            if start >= launched + self._offset:
                whole[key].append(end - start)
            else:
                gapped.append((key, end - start))
        known = self.device_times
        known.update((key, median(lengths)) for key, lengths in whole.items())
        gaps = [max(0.0, length - known[key]) if key in known else nan for key, length in gapped]
        self.host_bound = sum(gaps)

    def reductions(self) -> dict[int, tuple[float, float]]:
        """Start and end of each reduction, by stage; call `times` first."""
        return {stage: (self._seconds(a), self._seconds(b)) for stage, (a, b) in self._reduced.items()}

    def ended(self) -> list[tuple[Op, OpTimes]]:
        """The ops that have ended, without waiting: in a failed step a kernel may never end."""
        by_op = zip(*[iter(self._times)] * len(OpTimes._fields), strict=False)
        over = takewhile(lambda ran: stream.is_over(ran[1][1]), zip(self._done, by_op, strict=False))
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
    device: Sequence[DeviceTime] = (),
    host_bound: Sequence[float] = (),
) -> Timeline:
    """The timeline of one step, complete or cut short.

    Args:
        ran: by rank, the ops that have ended.
        device, host_bound: as Timeline has them.
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
        reductions=tuple(of._replace(start=of.start - zero, end=of.end - zero) for of in reductions),
        device=tuple(device),
        host_bound=tuple(host_bound),
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
        backwards = [at for at, op in enumerate(self.program) if op.kind != "F"]
        forwards = [at for at, op in enumerate(self.program) if op.kind == "F"]
        if self.over or not backwards:
            return ""
        if len(self.done) < backwards[0]:
            return "warm-up"
        return "drain" if not forwards or len(self.done) > forwards[-1] else "steady phase"


def account(progress: Progress | None, waiting: str = "") -> FailurePoint:
    """The progress in words.

    Args:
        progress: None before the first step.
        waiting: e.g. ``waiting for 2B0 from rank 2``.
    """
    if progress is None:
        return FailurePoint(f"{waiting or 'at work'}, before the first step")
    if progress.current is not None:
        doing = f"in {progress.current}"
    elif waiting:
        doing = waiting
    else:
        doing = "between steps" if progress.over else f"before {progress.program[len(progress.done)]}"
    last = " ".join(map(str, progress.last_ops))
    done = f"{len(progress.done)} of {len(progress.program)} ops done"
    return FailurePoint(
        ", ".join(filter(None, (doing, progress.phase))), f"{done}, the last {last}" if last else done
    )
