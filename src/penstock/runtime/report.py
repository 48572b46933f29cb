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


def report(executor: Executor) -> Tensor:
    """One rank's vector, float64."""
    loss = float(torch.stack(executor.shares).double().sum()) if executor.shares else 0.0
    marks = [time for _, *times in executor.recorder.marks() for time in times]
    longest = 2 * max(len(program) for program in executor.plan.schedule.programs)
    padding = [0.0] * (longest - len(marks))
    return torch.tensor([loss, executor.peak_live, *marks, *padding], dtype=torch.float64)


def total_loss(reports: Sequence[Tensor]) -> float:
    """Ranks without the last stage report a share of 0."""
    return sum(float(vector[0]) for vector in reports)


def bubble(schedule: Schedule, reports: Sequence[Tensor]) -> float:
    """As Timeline.bubble, without making a span of every op."""
    times = [_times(schedule, rank, vector) for rank, vector in enumerate(reports)]
    makespan = max(float(t.max()) for t in times) - min(float(t.min()) for t in times)
    busy = sum(float((t[:, 1] - t[:, 0]).sum()) for t in times)
    return 1 - busy / (makespan * schedule.ranks) if makespan else 0.0


def measured(schedule: Schedule, reports: Sequence[Tensor]) -> Timeline:
    """The step's timeline."""
    marks = [
        [(start, end) for start, end in _times(schedule, rank, vector).tolist()]
        for rank, vector in enumerate(reports)
    ]
    return timeline(schedule, marks, [int(vector[1]) for vector in reports])


def _times(schedule: Schedule, rank: int, vector: Tensor) -> Tensor:
    return vector[2 : 2 + 2 * len(schedule.programs[rank])].reshape(-1, 2)
