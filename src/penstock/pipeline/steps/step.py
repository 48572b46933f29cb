"""A step as its parts see it, and a part: what one feature does before a step, around its ops and after it.

    check     this rank looks for the caller's errors, such as an optimizer over other parameters
    begin     all ranks have agreed on the batch
    around    the ops run
    end       all ranks have each other's reports
    failed    the step has failed, and none of the other methods follows

A feature is one file with a subclass, and one line in a list of `Pipeline.__init__`. Some parts exchange
messages, so every rank has the same parts in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

from penstock.batch.microbatches import StepInput
from penstock.batch.shapes import Microbatch
from penstock.pipeline.steps.schedules import LoweredSchedule
from penstock.pipeline.steps.split_batch import BatchLike
from penstock.runtime import step_report as report
from penstock.schedule import Schedule

StepRecord = tuple[Schedule, report.Reports]  # a step's schedule, and the ranks' reports


class StepResult(NamedTuple):
    """The outcome of a step: the same numbers on every rank.

    Attributes:
        loss: mean over the batch's valid tokens, or over what the loss counts
        tokens: number of valid tokens, over all microbatches and all parts of the batch
        bubble: share of the ranks' time in which they did not compute, from 0 to 1
        norm: that of all gradients, before they were clipped; None for a step without an optimizer
        host_share: share of the ranks' time in which GPUs waited, within ops, for their hosts; None where it
            is not known (`Pipeline.measuring_device`), and on the CPU
    """

    loss: float
    tokens: int
    bubble: float
    norm: float | None = None
    host_share: float | None = None


_NO_RESULT = StepResult(0.0, 0, 0.0)


@dataclass
class Step:
    """One run of a schedule on a batch.

    batch: as the caller gave it, with its numbers on the host
    microbatches: of all ranks of cp together; `input` has this rank's part of them
    tokens: valid ones of all parts of the batch, where the last stage computes the loss
    reports: of all ranks, once the ops have run
    result: once the ops have run
    """

    lowered: LoweredSchedule
    batch: BatchLike
    microbatches: Sequence[Microbatch]
    input: StepInput
    tokens: int
    reports: report.Reports = ()
    result: StepResult = _NO_RESULT

    @property
    def trains(self) -> bool:
        """Whether the schedule has backwards."""
        return self.lowered.schedule.trains

    @property
    def record(self) -> StepRecord:
        return self.lowered.schedule, self.reports


class StepPart:
    """What one feature does in a step. Each method does nothing unless it is overridden.

    Attributes:
        facts: words for what must be equal on all ranks of the step
    """

    facts = ""

    @property
    def changed(self) -> bool:
        """Whether copies of weights have come to differ on this process: each rank reports it to all."""
        return False

    def check(self, microbatches: Sequence[Microbatch]) -> None:
        """Raise an InputError for an error of the caller. If one rank raises it, all ranks raise."""

    def begin(self, step: Step) -> None:
        """All ranks have agreed on the batch, and nothing is sent yet."""

    def around(self, step: Step) -> AbstractContextManager[object]:
        """Entered before the first op, and left after the last one."""
        return nullcontext()

    def end(self, step: Step) -> None:
        """All ops have run, and every rank has the reports."""

    def failed(self) -> None:
        """The step has failed, perhaps before `begin`."""

    def close(self) -> None:
        """No step follows."""
