"""A step, and its parts: what one feature does before a step, around its ops and after it.

    check     before the ranks agree: raise the caller's errors, such as an optimizer over other parameters
    begin     after all ranks have agreed on the batch
    around    a context for the ops
    end       after every rank has all reports
    failed    after a failure, in place of the methods that have not been called

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
    """The outcome of a step: the same values on every rank.

    Attributes:
        loss: mean over the batch's valid tokens, or over the items that the loss counts
        tokens: number of valid tokens, over all microbatches and all parts of the batch
        bubble: share of the ranks' time in which they did not compute, from 0 to 1
        norm: of all gradients, before clipping; None for a step without an optimizer
        host_share: share of the ranks' time in which GPUs waited, within ops, for their hosts; None where it
            is not known (`Pipeline.measuring_device`), and on the CPU
        accuracy: share of the tokens whose label no other token's logit exceeds, from 0 to 1; None without
            such tokens, and for a loss that does not count them, as all but NextToken(accuracy=True)
    """

    loss: float
    tokens: int
    bubble: float
    norm: float | None = None
    host_share: float | None = None
    accuracy: float | None = None


def accuracy_of(results: Sequence[StepResult]) -> float | None:
    """The accuracy over all tokens of these results; None if that of some is not known."""
    counted = [(result.accuracy, result.tokens) for result in results if result.tokens]
    known = [(share, tokens) for share, tokens in counted if share is not None]
    if not known or len(known) < len(counted):
        return None
    return sum(share * tokens for share, tokens in known) / sum(tokens for _, tokens in known)


_NO_RESULT = StepResult(0.0, 0, 0.0)


@dataclass
class Step:
    """One run of a schedule on a batch.

    batch: the caller's, with its integers on the host
    microbatches: with whole sequences; `input` has this cp rank's part of them
    tokens: number of valid tokens of all parts of the batch, if the last stage computes the loss
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
    """What one feature does in a step. Methods do nothing unless they are overridden.

    Attributes:
        facts: text that must be equal on all ranks of the step
    """

    facts = ""

    @property
    def changed(self) -> bool:
        """Whether copies of weights differ now on this process. Each rank reports it to all."""
        return False

    def check(self, microbatches: Sequence[Microbatch]) -> None:
        """Raise an InputError for an error of the caller. If one rank raises it, all ranks raise."""

    def begin(self, step: Step) -> None:
        """Called after all ranks have agreed on the batch, before anything is sent."""

    def around(self, step: Step) -> AbstractContextManager[object]:
        """A context around all ops of the step."""
        return nullcontext()

    def end(self, step: Step) -> None:
        """Called after all ops, when every rank has the reports."""

    def failed(self) -> None:
        """Called after a failed step, which may not have reached `begin`."""

    def close(self) -> None:
        """Called when no step follows."""
