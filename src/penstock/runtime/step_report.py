"""What each rank tells all others at the end of a step: one vector, exchanged once.

    loss share | peak of live activations | peak of the bytes held between I and W |
    bytes at the peak of all: activations, buffers, held between I and W | whether it changed |
    of each of the rank's stages: start and end of its reduction beside the pipeline, or zeros |
    of each op, in program order: start and end, start and end of the wait before it | zeros to one length

With it every rank knows the step's loss, bubble and timeline, and nobody has to ask again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from penstock.runtime.executor import Executor
from penstock.runtime.memory import Held
from penstock.runtime.recorder import Marks, timeline
from penstock.schedule import Reduction, Schedule, Timeline
from penstock.schedule.timeline import covered

Reports = Sequence[Sequence[float]]  # by rank
_HEAD = 7  # what comes before the times
_EACH = len(Marks._fields)


def report(executor: Executor, changed: bool = False) -> Tensor:
    """One rank's vector, float64.

    changed: whether copies of weights that several stages share were frozen or unfrozen on this rank
    """
    loss = float(torch.stack(executor.ops.shares).double().sum()) if executor.ops.shares else 0.0
    schedule, marks = executor.plan.schedule, executor.recorder.times()
    found = executor.recorder.reductions()
    sums = [time for stage in _hosted(schedule, executor.plan.rank) for time in found.get(stage, (0.0, 0.0))]
    padding = [0.0] * (_longest(schedule) - len(sums) - len(marks))
    ledger = executor.ops.ledger
    head = [loss, executor.ops.peak_live, ledger.most_deferred, *ledger.peak, float(changed)]
    return torch.tensor([*head, *sums, *marks, *padding], dtype=torch.float64)


def total_loss(reports: Reports) -> float:
    """Ranks without a last stage report a share of 0."""
    return sum(vector[0] for vector in reports)


def deferred_bytes(reports: Reports) -> tuple[int, ...]:
    """By rank, the most that it held between I and W for its weights' gradients."""
    return tuple(int(vector[2]) for vector in reports)


def peak_held(reports: Reports) -> tuple[Held, ...]:
    """By rank, what it held when it held most."""
    return tuple(Held(*map(int, vector[3:6])) for vector in reports)


def any_changed(reports: Reports) -> bool:
    return any(vector[6] for vector in reports)


def bubble(schedule: Schedule, reports: Reports) -> float:
    """As Timeline.bubble, without making a span of every op."""
    marks = [_marks(schedule, rank, vector) for rank, vector in enumerate(reports)]
    ran = [rank for rank in marks if rank]  # a rank of a copy that gets no microbatch has nothing to do
    ends = [rank[-_EACH + 1] for rank in ran] + [of.end for of in _reductions(schedule, reports)]
    makespan = max(ends) - min(rank[0] for rank in ran)
    if schedule.overlaps:  # what runs side by side counts once
        busy = sum(covered(zip(rank[::_EACH], rank[1::_EACH], strict=True)) for rank in marks)
    else:
        busy = sum(sum(rank[1::_EACH]) - sum(rank[::_EACH]) for rank in marks)
    return 1 - busy / (makespan * schedule.ranks) if makespan else 0.0


def measured(schedule: Schedule, reports: Reports) -> Timeline:
    """The step's timeline."""
    marks = []
    for rank, (program, vector) in enumerate(zip(schedule.programs, reports, strict=True)):
        times = iter(_marks(schedule, rank, vector))
        marks.append(
            [(op, Marks(*of)) for op, of in zip(program, zip(*[times] * _EACH, strict=True), strict=True)]
        )
    peaks = [int(vector[1]) for vector in reports]
    return timeline(schedule, marks, peaks, [*_reductions(schedule, reports)])


def _reductions(schedule: Schedule, reports: Reports) -> Iterator[Reduction]:
    for rank, vector in enumerate(reports):
        for at, stage in enumerate(_hosted(schedule, rank)):
            start, end = vector[_HEAD + 2 * at : _HEAD + 2 * at + 2]
            if start:
                yield Reduction(rank, stage, start, end)


def _marks(schedule: Schedule, rank: int, vector: Sequence[float]) -> Sequence[float]:
    first = _HEAD + 2 * len(_hosted(schedule, rank))
    return vector[first : first + _EACH * len(schedule.programs[rank])]


def _hosted(schedule: Schedule, rank: int) -> tuple[int, ...]:
    return schedule.placement.stages_of(rank)


def _longest(schedule: Schedule) -> int:
    """Of all ranks' reductions and marks."""
    return max(
        2 * len(_hosted(schedule, rank)) + _EACH * len(program)
        for rank, program in enumerate(schedule.programs)
    )
