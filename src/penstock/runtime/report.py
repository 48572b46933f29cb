"""What each rank tells all others at the end of a step: one vector, exchanged once.

    loss share | peak of live activations | peak of the bytes held between I and W |
    bytes at the peak of all: activations, buffers, held between I and W |
    of each op, in program order: start and end, start and end of the wait before it | zeros to one length

With it every rank knows the step's loss, bubble and timeline, and nobody has to ask again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.runtime.executor import Executor
from penstock.runtime.memory import Held
from penstock.runtime.recorder import Marks, timeline
from penstock.schedule import Op, Schedule, Timeline
from penstock.schedule.timeline import covered

Reports = Sequence[Sequence[float]]  # by rank
_MARKS = 6  # where they begin
_EACH = len(Marks._fields)


def report(executor: Executor) -> Tensor:
    """One rank's vector, float64."""
    loss = float(torch.stack(executor.ops.shares).double().sum()) if executor.ops.shares else 0.0
    marks = executor.recorder.times()
    longest = _EACH * max(map(len, executor.plan.schedule.programs))
    padding = [0.0] * (longest - len(marks))
    ledger = executor.ops.ledger
    head = [loss, executor.ops.peak_live, ledger.most_deferred, *ledger.peak]
    return torch.tensor([*head, *marks, *padding], dtype=torch.float64)


def total_loss(reports: Reports) -> float:
    """Ranks without a last stage report a share of 0."""
    return sum(vector[0] for vector in reports)


def deferred_bytes(reports: Reports) -> tuple[int, ...]:
    """By rank, the most that it held between I and W for its weights' gradients."""
    return tuple(int(vector[2]) for vector in reports)


def peak_held(reports: Reports) -> tuple[Held, ...]:
    """By rank, what it held when it held most."""
    return tuple(Held(*map(int, vector[3:_MARKS])) for vector in reports)


def bubble(schedule: Schedule, reports: Reports) -> float:
    """As Timeline.bubble, without making a span of every op."""
    marks = [_marks(program, vector) for program, vector in zip(schedule.programs, reports, strict=True)]
    ran = [rank for rank in marks if rank]  # a rank of a copy that gets no microbatch has nothing to do
    makespan = max(rank[-_EACH + 1] for rank in ran) - min(rank[0] for rank in ran)
    if schedule.overlaps:  # what runs side by side counts once
        busy = sum(covered(zip(rank[::_EACH], rank[1::_EACH], strict=True)) for rank in marks)
    else:
        busy = sum(sum(rank[1::_EACH]) - sum(rank[::_EACH]) for rank in marks)
    return 1 - busy / (makespan * schedule.ranks) if makespan else 0.0


def measured(schedule: Schedule, reports: Reports) -> Timeline:
    """The step's timeline."""
    marks = []
    for program, vector in zip(schedule.programs, reports, strict=True):
        times = iter(_marks(program, vector))
        marks.append(
            [(op, Marks(*of)) for op, of in zip(program, zip(*[times] * _EACH, strict=True), strict=True)]
        )
    return timeline(schedule, marks, [int(vector[1]) for vector in reports])


def _marks(program: Sequence[Op], vector: Sequence[float]) -> Sequence[float]:
    return vector[_MARKS : _MARKS + _EACH * len(program)]
