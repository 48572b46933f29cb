"""Epochs: the steps that `train.epochs` stands for, and how often the rows were trained on so far.

    rows                100, of 12 a step
    train.epochs        1       1.5      3
    steps               9       13       25      the fewest that take 100, 150 and 300 rows

A batch goes on with the next epoch where one ends, so only the last step of the run takes rows beyond it.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.errors import ConfigError
from penstock.train.checkpoints import Start, check_left
from penstock.train.config.sections import TrainConfig
from penstock.train.data.batches import Data
from penstock.train.part import RunPart, TrainStep
from penstock.train.records.metrics import MetricsRow


def counted(config: TrainConfig, data: Data, start: Start) -> tuple[TrainConfig, str]:
    """The config with train.steps in place of train.epochs, and a line on them; empty without epochs.

    Raises ConfigError for keys that do not fit to so many steps, and if no step is left to do.
    """
    epochs = config.train.epochs
    if epochs is None:
        return config, ""
    steps, rows = data.steps_of(config.train), data.epoch
    section = config.train.model_copy(update={"steps": steps, "epochs": None})
    changed = config.model_copy(update={"train": section})
    value = f"train.epochs={epochs:g}, which is {steps:,} steps"
    line = f"{value} of {data.sizes.full.rows} rows: an epoch has {rows:,} rows"
    try:
        section.check_keys()
        changed.check_keys()
    except ValueError as error:
        rule, _, remedy = str(error).partition("; ")
        raise ConfigError(value, rule, remedy[0].upper() + remedy[1:]) from error
    check_left(steps, start.done, f"the checkpoint {start.checkpoint}", value)
    return changed, line


class Epochs(RunPart):
    """Says with each step how many epochs are done. A stream does not know."""

    _step = 0  # the last one

    def after(self, step: TrainStep) -> None:
        self._step = step.number

    def row(self, step: TrainStep) -> MetricsRow:
        done = self.run.steps.data.epochs_after(step.number)
        return {} if done is None else {"epoch": done}

    def summary(self) -> Iterator[str]:
        data = self.run.steps.data
        if (done := data.epochs_after(self._step)) is not None:
            yield f"epochs      {done:.3g} in {self._step:,} steps: an epoch has {data.epoch:,} rows"
