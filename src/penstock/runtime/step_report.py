"""The step report: what every rank sends to all others at the end of a step, as one vector, in one exchange.

    loss share | peak live activations | peak bytes held for W | bytes at the peak of all: activations,
    buffers, held for W | whether copies changed | squared norm of the gradients, where an optimizer steps
    | peak memory of the process: allocated, reserved, resident | what it asks of all
    | seconds of the ops by kind: F, B, I, W | how long of it a GPU waited for its host, or NaN
    | of each stage of the rank: start and end of its gradient reduction, or zeros
    | of each stage of the rank: seconds of a GPU for an op of each kind, or zeros
    | of each op, in program order: its OpTimes | zeros up to one length

With it every rank knows the step's loss, bubble and timeline, and no rank has to ask again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from math import inf, isfinite
from typing import NamedTuple

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
    peak_deferred: the most bytes that it held between I and W; held: its bytes when it held most
    changed: whether copies of the model differ on this rank: some weights frozen, or buffers written
    memory: of its process; asks: a number that all ranks learn, such as that of a signal
    seconds: that it computed; host_bound: what of them a GPU waited for its host, or NaN (Recorder)
    reductions: start and end for each of its stages, flat, or zeros; times: the OpTimes of its ops, flat
    device: seconds of a GPU for an op of each kind, for each of its stages, flat; 0 where they are not known
    """

    loss: float
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
# how many numbers are in front of the reductions: those of three tuples, and six that stand alone
_HEAD = sum(len(each._fields) for each in (Held, PeakMemory, OpSeconds)) + 6


def losses(executors: Sequence[Executor]) -> list[float]:
    """The loss shares of these ranks. Waits for a GPU once."""
    shares = [executor.ops.loss_shares for executor in executors]
    sums = [torch.stack(each).double().sum() for each in shares if each]
    values = iter(torch.stack(sums).tolist() if sums else ())
    return [next(values) if each else 0.0 for each in shares]


def pack(
    executor: Executor,
    memory: PeakMemory,
    loss: float = 0.0,
    changed: bool = False,
    asks: int = 0,
) -> Tensor:
    """One rank's report as a float64 vector, of the same length on all ranks. loss: from `losses`"""
    ops, schedule = executor.ops, executor.plan.schedule
    recorder = executor.recorder
    times, spans = recorder.times(), recorder.reductions()
    stages, known = schedule.placement.stages_of(executor.plan.rank), recorder.device_times
    reductions = [time for stage in stages for time in spans.get(stage, (0.0, 0.0))]
    device = [known.get((stage, kind), 0.0) for stage in stages for kind in _KINDS]
    peaks = ops.peak_live, ops.ledger.peak_deferred, *ops.ledger.peak
    seconds = OpSeconds.of(schedule.programs[executor.plan.rank], times)
    head = [loss, *peaks, float(changed), *memory, float(asks), *seconds, recorder.host_bound]
    body = [*reductions, *device, *times]
    longest = max(sum(_lengths(schedule, rank)) for rank in range(schedule.ranks))
    padding = [0.0] * (longest - len(body))
    return torch.tensor([*head, *body, *padding], dtype=torch.float64)


def unpack(schedule: Schedule, vectors: Sequence[Tensor]) -> Reports:
    """The reports of all ranks from their vectors, in order. Reads the numbers in the order of `pack`."""
    reports = []
    for rank, vector in enumerate(vectors):
        numbers, lengths = vector.tolist(), _lengths(schedule, rank)
        head, body = iter(numbers), iter(numbers[_HEAD:])
        reductions, device, times = (list(islice(body, length)) for length in lengths)
        reports.append(
            StepReport(
                loss=next(head),
                peak_live=int(next(head)),
                peak_deferred=int(next(head)),
                held=Held(*map(int, islice(head, len(Held._fields)))),
                changed=bool(next(head)),
                memory=PeakMemory(*map(int, islice(head, len(PeakMemory._fields)))),
                asks=int(next(head)),
                seconds=OpSeconds(*islice(head, len(OpSeconds._fields))),
                host_bound=next(head),
                reductions=reductions,
                device=device,
                times=times,
            )
        )
    return reports


def _lengths(schedule: Schedule, rank: int) -> tuple[int, int, int]:
    """How many numbers describe the reductions of a rank, what a GPU takes, and the ops."""
    stages = len(schedule.placement.stages_of(rank))
    return _REDUCTION * stages, len(_KINDS) * stages, _TIMES * len(schedule.programs[rank])


def shares(schedule: Schedule, reports: Reports) -> tuple[float, float | None]:
    """The same as `Timeline.bubble` and `Timeline.host_share`, without a span for every op."""
    ran = [each.times for each in reports if each.times]  # a rank of an unused copy of the model has no ops
    ends = [times[-_TIMES + 1] for times in ran] + [of.end for of in _reductions(schedule, reports)]
    makespan = max(ends) - min(times[0] for times in ran)
    busy = sum(sum(times[1::_TIMES]) - sum(times[::_TIMES]) for times in ran)
    all_time = makespan * schedule.ranks or inf
    gaps = _host_bound(reports)
    return 1 - busy / all_time if makespan else 0.0, sum(gaps) / all_time if gaps else None


def _host_bound(reports: Reports) -> tuple[float, ...]:
    """As Timeline has it: empty where a rank does not know its own."""
    gaps = tuple(each.host_bound for each in reports)
    return gaps if all(map(isfinite, gaps)) else ()


def ends(reports: Reports) -> list[float]:
    """When each rank ended its last op or reduction; 0 for a rank without ops."""
    return [max([0.0, *each.times[1::_TIMES], *each.reductions]) for each in reports]


def measured(schedule: Schedule, reports: Reports) -> Timeline:
    """The timeline of the step."""
    ran = []
    for program, each in zip(schedule.programs, reports, strict=True):
        times = zip(*[iter(each.times)] * _TIMES, strict=True)
        ran.append([(op, OpTimes(*four)) for op, four in zip(program, times, strict=True)])
    peaks = [each.peak_live for each in reports]
    return timeline(
        schedule, ran, peaks, [*_reductions(schedule, reports)],
        device=[*_device_times(schedule, reports)], host_bound=_host_bound(reports),
    )  # fmt: skip


def _device_times(schedule: Schedule, reports: Reports) -> Iterator[DeviceTime]:
    for rank, each in enumerate(reports):
        stages = schedule.placement.stages_of(rank)
        places = [(stage, kind) for stage in stages for kind in _KINDS]
        for (stage, kind), seconds in zip(places, each.device, strict=True):
            if seconds:
                yield DeviceTime(stage, kind, seconds)


def _reductions(schedule: Schedule, reports: Reports) -> Iterator[Reduction]:
    for rank, each in enumerate(reports):
        stages = schedule.placement.stages_of(rank)
        for stage, start, end in zip(stages, each.reductions[::2], each.reductions[1::2], strict=True):
            if start:
                yield Reduction(rank, stage, start, end)
