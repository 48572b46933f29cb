"""Steps that the optimizers skip: loss or gradients are not finite, or the loss is a spike.

A loss is a spike if it rises far above those before it (train.spike). Such a step is skipped, or the run
goes back:

    step                 50    51    52    53 = a spike        51    52 ...
    rows                 ...   0-7   8-15  16-23               24-31 32-39
    checkpoint of step   50                        goes back to 50

A run that goes back leaves out the rows of all steps since its checkpoint. With the same rows it would get
the same weights, bit for bit, and the same loss. The losses of the steps before determine which steps are
spikes. A checkpoint holds them, so that a resumed run decides as an undisturbed one does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from penstock.checkpoint.save_load import load_checkpoint
from penstock.errors import RunError
from penstock.train.part import Run, RunPart, TrainStep
from penstock.train.records.metrics import MetricsRow
from penstock.train.state import read_state

REWINDS = 3  # in a row, to one checkpoint, after which the weights and not the rows are the cause
IN_A_ROW = 10  # skipped steps, after which the weights and not the batches are the cause
_REMEDY = "Lower optimizer.learning_rate, lengthen optimizer.warmup_steps, or use train.precision=float32"


class Skips(RunPart):
    """Skips a step whose loss or gradients are not finite, or ends the run there.

    Loss and norm are those of the whole mesh, the same on every rank, so all ranks skip the same steps.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._in_a_row = 0
        self._not_finite = self._ranks = ""  # of the last step: its values, and whose gradients

    def judge(self, step: TrainStep) -> str:
        pipe = self.run.pipe
        self._not_finite = not_finite(loss=step.result.loss, grad_norm=step.norm)
        self._ranks = (pipe.find_not_finite() or pipe.not_finite) if self._not_finite else ""
        return self._not_finite

    def row(self, step: TrainStep) -> MetricsRow:
        row: MetricsRow = {"skipped": step.skipped} if step.skipped else {}
        return row | ({"skipped_steps": self.run.state.skipped} if self.run.state.skipped else {})

    def check(self, step: TrainStep) -> None:
        """Raise RunError if train.nonfinite=stop, and at the last of too many skipped steps in a row."""
        self._in_a_row = self._in_a_row + 1 if step.skipped and step.back_to is None else 0
        if self._not_finite and self.run.config.train.nonfinite == "stop":
            raise stopped(step.number, self._not_finite, self._ranks)
        if self._in_a_row == IN_A_ROW:
            whose = f"; at the last the gradients of {self._ranks} were not finite" if self._ranks else ""
            error = RunError(
                f"steps {step.number - IN_A_ROW + 1} to {step.number}: {step.skipped} at the last",
                f"{IN_A_ROW} steps in a row were skipped, so the batches are not the cause{whose}",
                f"Go on from the last checkpoint with --resume. {_REMEDY}",
            )
            error.names_rank = bool(self._ranks)
            raise error

    def summary(self) -> Iterator[str]:
        if count := self.run.state.skipped:
            spikes = "" if self.run.config.train.spike is None else ", or whose loss rose too far"
            yield f"skipped     {count} steps, whose loss or gradients were not finite{spikes}"


def not_finite(**values: float) -> str:
    """All values in words if one is not finite; else empty."""
    if all(math.isfinite(value) for value in values.values()):
        return ""
    return ", ".join(f"{name}={value}" for name, value in values.items())


def stopped(step: int, reason: str, ranks: str = "") -> RunError:
    """The error for values that are not finite. ranks: whose gradients, in words; empty for none"""
    rule = "these are finite numbers while a model trains"
    error = RunError(
        f"step {step}: {reason}",
        f"{rule}, and so are gradients: not those of {ranks}" if ranks else rule,
        f"{_REMEDY}. Single steps may be skipped with train.nonfinite=skip",
    )
    error.names_rank = bool(ranks)  # so that the report does not name the raising rank as well
    return error


class Spikes(RunPart):
    """Detects the spikes of a run, the same on every rank, as all have the same loss."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._section = run.config.train.spike
        self._rewinds = 0  # in a row, to `_rewound_to`
        self._rewound_to: Path | None = None

    @property
    def limit(self) -> float:
        """The largest loss that is no spike."""
        section, losses = self._section, self.run.state.seen.losses
        if section is None or len(losses) < section.window:
            return math.inf
        middle = median(losses[-section.window :])
        return section.factor * middle if middle > 0 else math.inf

    def judge(self, step: TrainStep) -> str:
        section, loss, seen = self._section, step.result.loss, self.run.state.seen
        if section is None:
            return ""
        if loss <= self.limit:
            seen = seen._replace(losses=(*seen.losses, loss)[-section.window :])
            self.run.state = self.run.state._replace(seen=seen)
            return ""
        if section.then == "rewind":
            step.back_to = self.run.checkpoint
        middle = median(seen.losses[-section.window :])
        times = f"{loss / middle:.3g} times the median of the last {section.window}, {middle:.4g}"
        return f"loss={loss:.4g} is {times}"

    def row(self, step: TrainStep) -> MetricsRow:
        row: MetricsRow = {} if step.back_to is None else {"back_to": step.back_to.name}
        seen = self.run.state.seen
        return row | ({"rows_left_out": seen.rows} if seen.left_out else {})

    def check(self, step: TrainStep) -> None:
        """Go back to the last checkpoint, and on from there with the rows that follow those of `step`.

        Raises RunError if the run has gone back too often, and what `load_checkpoint` and `Data.without`
        raise.
        """
        run, checkpoint = self.run, step.back_to
        if checkpoint is None:
            return
        run.log.flush()
        run.writer.wait()
        load_checkpoint(checkpoint, run.pipe, run.optimizers, learning_rates=False)
        state = read_state(checkpoint)
        data, rows = run.steps.data.without(
            state.step, step.number, step.batch.position, run.config.train.last
        )
        self._count(step.number, checkpoint, state.step)
        left_out = (*run.state.seen.left_out, (rows.start, rows.stop))
        run.state = state._replace(seen=state.seen._replace(left_out=left_out))
        run.steps.restart(data, state.step)
        without = f"without rows {rows.start:,} to {rows.stop - 1:,} of the run"
        run.display.say(f"step {step.number}: back to step {state.step}, and on from there {without}")

    def _count(self, step: int, checkpoint: Path, done: int) -> None:
        """Raise RunError if the run has gone back to this checkpoint, of step `done`, too often."""
        self._rewinds = self._rewinds + 1 if checkpoint == self._rewound_to else 1
        self._rewound_to = checkpoint
        if self._rewinds > REWINDS:
            raise RunError(
                f"step {step}: the loss rose again",
                f"the run has gone back to step {done} {REWINDS} times in a row, each time with other rows, "
                "so the rows are not the cause",
                "Go on from an older checkpoint with --resume PATH and a lower optimizer.learning_rate, or "
                "raise train.spike.factor",
            )

    def summary(self) -> Iterator[str]:
        seen = self.run.state.seen
        if seen.left_out:
            count = len(seen.left_out)
            times = "once" if count == 1 else f"{count} times"
            yield f"left out    {seen.rows} rows: after a spike of the loss the run went back, {times}"
