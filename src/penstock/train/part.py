"""A run under way, and its parts: all that it does besides batch, pipeline calls and update is a part.

    running                around the whole run
    training               around all steps
    prepare                adds entries to the batch of a step or an evaluation
    referred               adds to the reference of the check before training
    around                 around each step; within it, in this order:
        computed           the gradients are computed; next they are clipped
        judge              why to skip the step; without a reason the optimizers update the weights
        row                entries of the step's row, which a thread then shows and writes
    check                  raises an error, or takes the run back to a checkpoint
    after                  evaluates; may end the run
        evaluated          entries of the evaluation's row
    keep                   saves
    summary, end           when the run has ended

parts.py lists the parts. A new feature is one class and one line there.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from penstock.checkpoint.save_load import CheckpointWriter
from penstock.pipeline.pipeline import Pipeline
from penstock.pipeline.steps.step import StepResult
from penstock.pipeline.whole_step import WholeStepLoss
from penstock.train.check.before_training import Reference
from penstock.train.checkpoints import Start
from penstock.train.config.sections import TrainConfig
from penstock.train.data.batches import Data, LoadedBatch
from penstock.train.owner import Owner
from penstock.train.records.metrics import Display, Log, MetricsRow
from penstock.train.sizes import Size
from penstock.train.state import RunState

Call = Callable[..., StepResult]  # of the pipeline, with a batch


class Steps:
    """The steps to come, and their batches. A thread makes the next batch while a step runs."""

    def __init__(self, data: Data, done: int, last: int, device: torch.device) -> None:
        self._last, self._device = last, device
        self._batches: Generator[LoadedBatch] | None = None
        self.restart(data, done)

    def restart(self, data: Data, done: int) -> None:
        """Go on after step `done`, with the batches of `data`."""
        self.close()
        self.data, self._done = data, done
        self._batches = data.batches(range(done + 1, self._last + 1), self._device)

    def __iter__(self) -> Iterator[int]:
        while self._done < self._last:
            self._done += 1
            yield self._done

    def batch(self) -> LoadedBatch:
        """The batch of the current step. Call it once a step."""
        assert self._batches is not None
        return next(self._batches)

    def close(self) -> None:
        """End the thread."""
        if self._batches is not None:
            self._batches.close()


@dataclass
class TrainStep:
    """One step of a run, complete or under way.

    Attributes:
        number: from 1
        batch: this process's part of the batch; once the step is done, without its tensors
        result: of all pipeline calls of the step
        norm: of the gradients, before they were clipped
        seconds: from the wait for the batch to the end of the optimizers
        skipped: why the optimizers skip the step; empty if they do not
        back_to: the checkpoint that the run goes back to because of this step
        ended: why the run ends after the step; empty if it goes on
        stopped: whether the run ends because of a signal
    """

    number: int
    size: Size
    batch: LoadedBatch
    result: StepResult
    norm: float
    seconds: float = 0.0
    skipped: str = ""
    back_to: Path | None = None
    ended: str = ""
    stopped: bool = False


@dataclass
class Run:
    """A run: the objects that the loop and the parts share.

    Attributes:
        owner: of the output folder; on the first process
        parts: in the order in which they are called
        whole: the loss, if it is one of the whole step
        state: the run's entries in a checkpoint, up to now; loop and parts replace them
        checkpoint: the newest one of the run; None before the first
    """

    config: TrainConfig
    pipe: Pipeline
    optimizers: Sequence[Optimizer]
    start: Start
    steps: Steps
    display: Display
    log: Log
    writer: CheckpointWriter
    owner: Owner | None
    parts: Sequence[RunPart] = ()
    whole: WholeStepLoss | None = None

    def __post_init__(self) -> None:
        of_all = self.whole
        self.step: Call = self.pipe.step if of_all is None else partial(of_all.step, self.pipe)
        self.evaluate: Call = self.pipe.evaluate if of_all is None else partial(of_all.evaluate, self.pipe)
        self.state: RunState = self.start.state
        self.checkpoint: Path | None = self.start.checkpoint

    def prepare(self, batch: LoadedBatch) -> LoadedBatch:
        """The batch with what the parts add to it before its pipeline calls. Collective."""
        for part in self.parts:
            batch = part.prepare(batch)
        return batch

    def referred(self, reference: Reference) -> Reference:
        """The reference of the check before training, with what the parts add."""
        for part in self.parts:
            reference = part.referred(reference)
        return reference

    def evaluates(self, step: int) -> bool:
        """Whether an evaluation follows the step with this number."""
        section = self.config.train
        return step % section.evaluate_every == 0 or step == section.last

    def state_after(self, step: TrainStep) -> Callable[[], dict[str, Any]]:
        """A function that returns the state after `step` in JSON, in any thread and at any later time."""
        state, data, owner, position = self.state, self.steps.data, self.owner, step.batch.position

        def in_json() -> dict[str, Any]:
            run = None if owner is None else owner.run  # only the first process writes it
            return state.after(step.number, run, self.config, data.state(step.number, position))

        return in_json


class RunPart:
    """One feature of a run. Every method here does nothing; a part overrides those that it needs.

    All ranks have the same parts in the same order, so a method may be collective.
    """

    def __init__(self, run: Run) -> None:
        self.run = run

    def running(self) -> AbstractContextManager[object]:
        """Around the whole run, from before the line of `note` to the run's end or error."""
        return nullcontext()

    @property
    def note(self) -> str:
        """A line to show before the run begins; empty for none."""
        return ""

    def training(self) -> AbstractContextManager[None]:
        """Around all steps: from before the first one until the state after the last one is saved."""
        return nullcontext()

    def around(self, step: int) -> AbstractContextManager[None]:
        """Around the step with this number."""
        return nullcontext()

    def prepare(self, batch: LoadedBatch) -> LoadedBatch:
        """The batch of a step or an evaluation, with the entries that the part adds."""
        return batch

    def referred(self, reference: Reference) -> Reference:
        """The reference model of the check before training, with what the part adds to it."""
        return reference

    def computed(self, step: int) -> None:
        """Called when the gradients of the step are computed, and the weights are still those before it."""

    def judge(self, step: TrainStep) -> str:
        """Why the optimizers must skip the step, the same on all ranks; empty if they need not.

        After the first reason the later parts are not called.
        """
        return ""

    def row(self, step: TrainStep) -> MetricsRow:
        """Entries of the step's row in metrics.jsonl."""
        return {}

    def evaluated(self) -> MetricsRow:
        """Entries of the row of an evaluation that has just run."""
        return {}

    def check(self, step: TrainStep) -> None:
        """Raise an error if the run must not go on, or go back to the checkpoint `step.back_to`."""

    def after(self, step: TrainStep) -> None:
        """Measure or decide something between two steps. It may set `step.ended`."""

    def keep(self, step: TrainStep) -> None:
        """Save a part of the state after the step. `step.ended` is final."""

    def summary(self) -> Iterator[str]:
        """Lines to print when the run has ended by itself. Called on the first process only."""
        yield from ()

    def end(self) -> None:
        """Called last, when no process reads or writes files of the run any more."""
