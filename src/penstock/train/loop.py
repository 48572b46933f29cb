"""The training loop, from the first evaluation to the last checkpoint."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch.optim import Optimizer

from penstock.checkpoint.save_load import CheckpointWriter
from penstock.errors import RunError
from penstock.models.source import TOKENIZER, beside
from penstock.pipeline.pipeline import Pipeline
from penstock.schedule import Timeline
from penstock.train.checkpoints import checkpoint_folder, prune, state_after
from penstock.train.config.sections import TrainConfig
from penstock.train.data.loading import Data
from penstock.train.data.rows import Fill
from penstock.train.data.tokenizer import Tokenizer
from penstock.train.metrics import Display, Metrics, Row
from penstock.train.optimizer import learning_rate, set_learning_rates

# ---- Steps whose loss or gradients are not finite: they end the run, or are left out of it.


IN_A_ROW = 10  # steps left out, after which weights and not batches are to blame
_CALMER = "Lower optimizer.learning_rate, lengthen optimizer.warmup_steps, or use model.dtype=float32"


@dataclass
class Skips:
    """How many steps were left out: in all, since the run began, and of the last ones.

    What is judged are the loss and the norm of the whole mesh, the same numbers on every rank. So all ranks
    judge alike, and need not tell each other.
    """

    mode: Literal["stop", "skip"]
    count: int = 0
    in_a_row: int = 0

    def leaves_out(self, step: int, **values: float) -> bool:
        """Whether `step`, whose loss and norm are these, must not reach the weights.

        Raises RunError in its place with "stop", and where it is the last of too many.
        """
        if not_finite(**values) is None:
            self.in_a_row = 0
            return False
        if self.mode == "stop":
            check_finite(step, **values)
        self.count += 1
        self.in_a_row += 1
        if self.in_a_row == IN_A_ROW:
            raise RunError(
                f"steps {step - IN_A_ROW + 1} to {step}: {not_finite(**values)} at the last",
                f"{IN_A_ROW} steps in a row were left out, which no batch explains",
                f"Go on from the last checkpoint with --resume. {_CALMER}",
            )
        return True


def not_finite(**values: float) -> str | None:
    """All of them in words, where one is not finite."""
    if all(math.isfinite(value) for value in values.values()):
        return None
    return ", ".join(f"{name}={value}" for name, value in values.items())


def check_finite(step: int, **values: float) -> None:
    """Before the optimizer spoils the weights with it. Raises RunError."""
    if (found := not_finite(**values)) is not None:
        raise RunError(
            f"step {step}: {found}",
            "these are finite numbers while a model trains",
            f"{_CALMER}. Single steps may be left out with train.nonfinite=skip",
        )


@dataclass(frozen=True)
class Run:
    """All that the loop works with. `done` steps lie behind, of which so many were `skipped`; only process 0
    has metrics.
    """

    config: TrainConfig
    pipe: Pipeline
    data: Data
    optimizers: list[Optimizer]
    tokenizer: Tokenizer
    display: Display
    metrics: Metrics | None
    writer: CheckpointWriter
    done: int = 0
    skipped: int = 0

    @property
    def output(self) -> Path:
        return Path(self.config.output.folder).expanduser()


@dataclass(frozen=True)
class Outcome:
    """What a finished run leaves: its last checkpoint, what its last step really did, all steps' fill.

    skipped: steps left out, in all
    """

    checkpoint: Path
    timeline: Timeline
    fill: Fill
    skipped: int = 0


def train(run: Run) -> Outcome:
    """Train from step `done` + 1 to the last. Collective.

    Raises RunError where loss or gradients are not finite, unless such steps are to be left out.
    """
    section = run.config.train
    if run.done == 0:
        _evaluate(run, 0)
    fill, skips = Fill(), Skips(section.nonfinite, run.skipped)
    for step in range(run.done + 1, section.steps + 1):
        fill += _step(run, step, skips)
        if step % section.evaluate_every == 0 or step == section.steps:
            _evaluate(run, step)
        if step == section.steps or (section.checkpoint_every and step % section.checkpoint_every == 0):
            path = _save(run, step, skips.count)
    run.writer.wait()
    return Outcome(path, run.pipe.timeline, fill, skips.count)


def _save(run: Run, step: int, skipped: int) -> Path:
    path = checkpoint_folder(run.output, step)
    state = state_after(step, run.config, skipped)
    run.writer.save(
        path, run.optimizers, state, extra=partial(_save_tokenizer, run), then=partial(_prune, run, path)
    )
    return path


def _prune(run: Run, written: Path) -> None:
    """What cannot be removed costs room on the disk, and no run."""
    try:
        prune(written, run.config.output.keep)
    except OSError as error:
        run.display.say(f"penstock: warning: older checkpoints of {written.parent} were not removed: {error}")


def _save_tokenizer(run: Run, folder: Path) -> None:
    """In place of the one that came with the model: the run's may be another, and both cannot be read."""
    for file in beside(folder, TOKENIZER).values():
        file.unlink()
    run.tokenizer.save(folder)


def seed_step(pipe: Pipeline, seed: int, step: int) -> None:
    """Make what a step draws at random follow from the step: a resumed run needs no state of it.

    Where the step goes on from there by layers and microbatches (`Pipeline.draws`) on whatever mesh, so from
    one seed; else, such as a router's noise, on each rank from its own, or all would draw the same.
    """
    place = () if pipe.draws else (pipe.processes.index, pipe.batch_part[0])
    torch.manual_seed(int(np.random.SeedSequence((seed, step, *place)).generate_state(1)[0]))


def _step(run: Run, step: int, skips: Skips) -> Fill:
    section = run.config.train
    started = time.perf_counter()
    seed_step(run.pipe, section.seed, step)
    taken = step - skips.count  # as many as the rate has seen
    set_learning_rates(run.config.optimizer, run.optimizers, section.steps, taken)
    run.pipe.zero_grad()
    batch = run.data.batch(step)
    result = run.pipe.step(batch.content)
    norm = run.pipe.clip_grad_norm_(section.clip_norm or math.inf)
    judged = {"loss": result.loss, "grad_norm": norm}
    if skips.leaves_out(step, **judged):
        run.pipe.zero_grad()
    else:
        for optimizer in run.optimizers:
            optimizer.step()
    seconds = time.perf_counter() - started
    named = run.config.optimizer
    row: Row = {
        "step": step,
        "learning_rate": learning_rate(named, named.learning_rate, section.steps, taken),
        **{name: value if math.isfinite(value) else None for name, value in judged.items()},
        "tokens": result.tokens,
        "tokens_per_second": result.tokens
        / seconds,  # those that the loss counts, which padding is not among
        "padding": batch.fill.padding,
        "bubble": result.bubble,
        "seconds": seconds,
    }
    if reason := not_finite(**judged):
        row |= {"skipped": reason}
    if skips.count:
        row |= {"skipped_steps": skips.count}
    run.display.step(row)
    if run.metrics:
        run.metrics.write(row)
    return batch.fill


def _evaluate(run: Run, step: int) -> None:
    """Mean loss a token over the held-out batches."""
    started = time.perf_counter()
    batches = run.data.held_out_batches(run.config.train.evaluate_batches)
    results = [run.pipe.evaluate(batch.content) for batch in batches]
    tokens = sum(result.tokens for result in results)
    loss = sum(result.loss * result.tokens for result in results) / tokens
    check_finite(step, held_out_loss=loss)
    if run.metrics:
        seconds = time.perf_counter() - started
        run.metrics.write({"step": step, "held_out_loss": loss, "tokens": tokens, "seconds": seconds})
    run.display.say(f"step {step}/{run.config.train.steps}  held-out loss {loss:.4f} nats a token")
