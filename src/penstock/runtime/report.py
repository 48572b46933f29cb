"""What each rank tells all others at the end of a step: one vector, exchanged once.

    loss share | peak of live activations | start and end of each op, in program order | zeros to one length

With it every rank knows the step's loss, bubble and timeline, and nobody has to ask again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.runtime.executor import Executor
from penstock.runtime.recorder import timeline
from penstock.schedule import Schedule, Timeline

Reports = Sequence[Sequence[float]]  # by rank


def report(executor: Executor) -> Tensor:
    """One rank's vector, float64."""
    loss = float(torch.stack(executor.shares).double().sum()) if executor.shares else 0.0
    marks = [time for _, *times in executor.recorder.marks() for time in times]
    longest = 2 * max(map(len, executor.plan.schedule.programs))
    padding = [0.0] * (longest - len(marks))
    return torch.tensor([loss, executor.peak_live, *marks, *padding], dtype=torch.float64)


def total_loss(reports: Reports) -> float:
    """Ranks without the last stage report a share of 0."""
    return sum(vector[0] for vector in reports)


def bubble(schedule: Schedule, reports: Reports) -> float:
    """As Timeline.bubble, without making a span of every op."""
    marks = [
        vector[2 : 2 + 2 * len(program)] for program, vector in zip(schedule.programs, reports, strict=True)
    ]
    makespan = max(max(rank) for rank in marks) - min(min(rank) for rank in marks)
    busy = sum(sum(rank[1::2]) - sum(rank[::2]) for rank in marks)
    return 1 - busy / (makespan * schedule.ranks) if makespan else 0.0


def measured(schedule: Schedule, reports: Reports) -> Timeline:
    """The step's timeline."""
    marks = []
    for program, vector in zip(schedule.programs, reports, strict=True):
        times = vector[2 : 2 + 2 * len(program)]
        marks.append(list(zip(times[::2], times[1::2], strict=True)))
    return timeline(schedule, marks, [int(vector[1]) for vector in reports])
