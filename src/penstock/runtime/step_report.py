"""The step report: what every rank sends to all others at the end of a step, as one vector, in one exchange.

    loss share | hits, or NaN | peak live activations | peak bytes held for W | bytes at the peak of all:
    activations, buffers, held for W | whether copies changed
    | squared norm of the gradients, where an optimizer steps
    | peak memory of the process: allocated, reserved, resident | a request to all ranks
    | seconds of the ops by kind: F, B, I, W | how long of it a GPU waited for its host, or NaN
    | for each stage of the rank: start and end of its gradient reduction, or zeros
    | for each stage of the rank: seconds of a GPU for an op of each kind, or zeros
    | for each op, in program order: its OpTimes | zeros up to one length

With it every rank knows the step's loss, bubble and timeline without another exchange.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from math import inf, isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.runtime.device.memory import Held, PeakMemory
from penstock.runtime.executor import Executor
from penstock.runtime.recorder import OpTimes, timeline
from penstock.schedule import DeviceTime, Op, Reduction, Schedule, Timeline
from penstock.schedule.ops import Kind

_TIMES = len(OpTimes._fields)
_KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")
_REDUCTION = 2  # start and end


class OpSeconds(NamedTuple):
    """How long a rank computed in a step, by the kind of op, without its waits between ops."""

    forward: float = 0.0
    backward: float = 0.0
    input_grad: float = 0.0
    weight_grad: float = 0.0

    @classmethod
    def of(cls, program: Sequence[Op], times: Sequence[float]) -> OpSeconds:
        """times: the OpTimes of the program's ops, flat"""
        totals = dict.fromkeys(_KINDS, 0.0)
        for op, start, end in zip(program, times[::_TIMES], times[1::_TIMES], strict=True):
            totals[op.kind] += end - start
        return cls(*totals.values())


class StepReport(NamedTuple):
    """One rank's report.

    loss: its share of the step's loss, 0 without a last stage
    hits: of the loss's tokens (penstock.batch.hits); NaN where they are not counted, 0 without a last stage
    peak_deferred: the most bytes that it kept between I and W; held: its bytes when their sum was highest
    changed: whether copies of the model differ on this rank: some weights frozen, or buffers written
    memory: of its process; asks: a number for all ranks, such as that of a signal
    seconds: of its compute; host_bound: seconds of it in which a GPU waited for its host, or NaN (Recorder)
    reductions: start and end for each of its stages, flat, or zeros; times: the OpTimes of its ops, flat
    device: seconds of a GPU for an op of each kind, for each of its stages, flat; 0 where they are not known
    """

    loss: float
    hits: float
    peak_live: int
    peak_deferred: int
    held: Held
    changed: bool
    memory: PeakMemory
    asks: int
    seconds: OpSeconds
    host_bound: float
    reductions: Sequence[float]
    device: Sequence[float]
    times: Sequence[float]


Reports = Sequence[StepReport]  # by rank
# the fields in front of the lists
_HEAD: Sequence[type[Any]] = (float, float, int, int, Held, bool, PeakMemory, int, OpSeconds, float)


def losses(executors: Sequence[Executor]) -> list[float]:
    """The loss shares of these ranks. Waits for a GPU once."""
    shares = [executor.loss_shares for executor in executors]
    sums = [torch.stack(of_rank).double().sum() for of_rank in shares if of_rank]
    values = iter(torch.stack(sums).tolist() if sums else ())
    return [next(values) if of_rank else 0.0 for of_rank in shares]


def pack(
    executor: Executor,
    memory: PeakMemory,
    loss: float = 0.0,
    hits: float = 0.0,
    changed: bool = False,
    asks: int = 0,
) -> Tensor:
    """One rank's report as a float64 vector, of the same length on all ranks. loss: from `losses`

    hits: of its process, in the report of one rank
    """
    schedule, recorder, ledger = executor.plan.schedule, executor.recorder, executor.memory.ledger
    times, spans = recorder.times(), recorder.reductions()
    stages, known = schedule.placement.stages_of(executor.plan.rank), recorder.device_times
    reductions = [time for stage in stages for time in spans.get(stage, (0.0, 0.0))]
    device = [known.get((stage, kind), 0.0) for stage in stages for kind in _KINDS]
    peaks = executor.memory.peak_live, ledger.peak_deferred, *ledger.peak
    seconds = OpSeconds.of(schedule.programs[executor.plan.rank], times)
    head = [loss, hits, *peaks, float(changed), *memory, float(asks), *seconds, recorder.host_bound]
    body = [*reductions, *device, *times]
    longest = max(sum(_lengths(schedule, rank)) for rank in range(schedule.ranks))
    padding = [0.0] * (longest - len(body))
    return torch.tensor([*head, *body, *padding], dtype=torch.float64)


def unpack(schedule: Schedule, vectors: Sequence[Tensor]) -> Reports:
    """The reports of all ranks from their vectors, in order. Reads the numbers in the order of `pack`."""
    reports = []
    for rank, vector in enumerate(vectors):
        numbers = iter(vector.tolist())
        head = [_read(numbers, kind) for kind in _HEAD]
        reports.append(StepReport(*head, *(list(islice(numbers, n)) for n in _lengths(schedule, rank))))
    return reports


def _read(numbers: Iterator[float], kind: type[Any]) -> Any:
    """The next field, of this type."""
    if not hasattr(kind, "_fields"):
        return kind(next(numbers))
    values = islice(numbers, len(kind._fields))
    return kind(*(values if kind is OpSeconds else map(int, values)))


def _lengths(schedule: Schedule, rank: int) -> tuple[int, int, int]:
    """How many numbers a rank reports on reductions, on a GPU's times, and on ops."""
    stages = len(schedule.placement.stages_of(rank))
    return _REDUCTION * stages, len(_KINDS) * stages, _TIMES * len(schedule.programs[rank])


def shares(schedule: Schedule, reports: Reports) -> tuple[float, float | None]:
    """The same as `Timeline.bubble` and `Timeline.host_share`, without a span for every op."""
    ran = [
        report.times for report in reports if report.times
    ]  # a rank of an unused copy of the model has no ops
    ends = [times[-_TIMES + 1] for times in ran] + [of.end for of in _reductions(schedule, reports)]
    makespan = max(ends) - min(times[0] for times in ran)
    busy = sum(sum(times[1::_TIMES]) - sum(times[::_TIMES]) for times in ran)
    all_time = makespan * schedule.ranks or inf
    gaps = _host_bound(reports)
    return 1 - busy / all_time if makespan else 0.0, sum(gaps) / all_time if gaps else None


def _host_bound(reports: Reports) -> tuple[float, ...]:
    """`Timeline.host_bound`: empty where a rank does not know its own."""
    gaps = tuple(report.host_bound for report in reports)
    return gaps if all(map(isfinite, gaps)) else ()


def measured(schedule: Schedule, reports: Reports) -> Timeline:
    """The timeline of the step."""
    ran = []
    for program, report in zip(schedule.programs, reports, strict=True):
        times = zip(*[iter(report.times)] * _TIMES, strict=True)
        ran.append([(op, OpTimes(*four)) for op, four in zip(program, times, strict=True)])
    peaks = [report.peak_live for report in reports]
    return timeline(
        schedule, ran, peaks, [*_reductions(schedule, reports)],
        device=[*_device_times(schedule, reports)], host_bound=_host_bound(reports),
    )  # fmt: skip


def _device_times(schedule: Schedule, reports: Reports) -> Iterator[DeviceTime]:
    for rank, report in enumerate(reports):
        stages = schedule.placement.stages_of(rank)
        ops = [(stage, kind) for stage in stages for kind in _KINDS]
        for (stage, kind), seconds in zip(ops, report.device, strict=True):
            if seconds:
                yield DeviceTime(stage, kind, seconds)


def _reductions(schedule: Schedule, reports: Reports) -> Iterator[Reduction]:
    for rank, report in enumerate(reports):
        stages = schedule.placement.stages_of(rank)
        for stage, start, end in zip(stages, report.reductions[::2], report.reductions[1::2], strict=True):
            if start:
                yield Reduction(rank, stage, start, end)
