"""The training loop, from the first evaluation to the last checkpoint.

evaluate                                         before the first step, every evaluate_every, at the end
for each step:  batch -> pipe.step -> clip -> optimizers, unless loss or norm is not finite; all of this in
                pipe.step with step_in_drain
                meanwhile one thread makes the next batch, and one writes the row of the step before
save                                             every checkpoint_every, at the end; in the background
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch.optim import Optimizer

from penstock.checkpoint.save_load import CheckpointWriter
from penstock.errors import RunError
from penstock.models.source import TOKENIZER, other_files
from penstock.pipeline.pipeline import Pipeline
from penstock.pipeline.step import StepResult
from penstock.runtime.rng import generator_of
from penstock.train.checkpoints import Start, checkpoint_folder, prune, state_after
from penstock.train.config.sections import TrainConfig
from penstock.train.data.loading import Batch, Data
from penstock.train.data.rows import Fill
from penstock.train.data.tokenizer import Tokenizer
from penstock.train.metrics import Display, Log, Metrics, Row
from penstock.train.optimizer import learning_rate, set_learning_rates
from penstock.train.outcome import Outcome

IN_A_ROW = 10  # skipped steps, after which the weights and not the batches are to blame
_REMEDY = "Lower optimizer.learning_rate, lengthen optimizer.warmup_steps, or use model.dtype=float32"


@dataclass(frozen=True)
class Run:
    """What the loop works with. metrics: on the first process only"""

    config: TrainConfig
    pipe: Pipeline
    data: Data
    optimizers: list[Optimizer]
    tokenizer: Tokenizer
    display: Display
    metrics: Metrics | None
    writer: CheckpointWriter
    start: Start


def train(run: Run) -> Outcome:
    """Train from the step after `run.start` to the last one. Collective.

    Raises: RunError where loss or gradients are not finite, unless such steps are to be skipped.
    """
    section = run.config.train
    if run.start.done == 0:
        _evaluate(run, 0)
    fill, skips = Fill(), Skips(section.nonfinite, run.start.skipped)
    steps = range(run.start.done + 1, section.steps + 1)
    with Log(run.display, run.metrics) as log, closing(run.data.batches(steps, run.pipe.device)) as batches:
        for step in steps:
            fill += _step(run, step, batches, skips, log)
            if step % section.evaluate_every == 0 or step == section.steps:
                log.flush()
                _evaluate(run, step)
            if step == section.steps or (section.checkpoint_every and step % section.checkpoint_every == 0):
                log.flush()
                path = _save(run, step, skips.count)
    run.writer.wait()
    return Outcome(path, run.pipe.timeline, fill, skips.count)


def _step(run: Run, step: int, batches: Iterator[Batch], skips: Skips, log: Log) -> Fill:
    section, optimizer_section = run.config.train, run.config.optimizer
    started = time.perf_counter()
    seed_step(run.pipe, section.seed, step)
    taken = step - skips.count  # skipped steps do not count for the rate
    set_learning_rates(optimizer_section, run.optimizers, section.steps, taken)
    run.pipe.zero_grad()
    batch = next(batches)
    result, norm = _gradients(run, batch)
    judged = {"loss": result.loss, "grad_norm": norm}
    reason = skips.judge(**judged)
    if reason:
        run.pipe.zero_grad()
    elif not section.step_in_drain:
        for optimizer in run.optimizers:
            optimizer.step()
    seconds = time.perf_counter() - started
    row: Row = {
        "step": step,
        "learning_rate": learning_rate(
            optimizer_section, optimizer_section.learning_rate, section.steps, taken
        ),
        **{name: value if math.isfinite(value) else None for name, value in judged.items()},
        "tokens": result.tokens,
        "tokens_per_second": result.tokens / seconds,  # tokens that the loss counts, so without padding
        "padding": batch.fill.padding,
        "bubble": result.bubble,
        "seconds": seconds,
    }
    if reason:
        row |= {"skipped": reason}
    if skips.count:
        row |= {"skipped_steps": skips.count}
    log.step(row)
    skips.check(step, reason)
    return batch.fill


def _gradients(run: Run, batch: Batch) -> tuple[StepResult, float]:
    """Run the pipeline's step, and clip; it also steps where step_in_drain. Returns the norm."""
    section = run.config.train
    limit = section.clip_norm or math.inf
    if section.step_in_drain:
        result = run.pipe.step(batch.content, optimizer=run.optimizers, max_norm=limit)
        assert result.norm is not None
        return result, result.norm
    return run.pipe.step(batch.content), run.pipe.clip_grad_norm_(limit)


def seed_step(pipe: Pipeline, seed: int, step: int) -> None:
    """Seed the random numbers of a step from its number, so that a resumed run needs no random state.

    Where the pipeline derives its draws from the seed by layer and microbatch (`Pipeline.draws`), every rank
    takes the same seed. Elsewhere each has its own, or a router's noise would be the same on all ranks.
    """
    place = () if pipe.draws else (pipe.processes.index, pipe.batch_part[0])
    number = int(np.random.SeedSequence((seed, step, *place)).generate_state(1)[0])
    # not torch.manual_seed: without a GPU it formats the stack each time, in case there will be one
    for generator in {torch.default_generator, generator_of(pipe.device)}:
        generator.manual_seed(number)


def _evaluate(run: Run, step: int) -> None:
    """Write and show the mean loss a token over the held-out batches."""
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


# ---- Steps whose loss or gradient norm is not finite


@dataclass
class Skips:
    """How many steps were skipped: in all, and in a row up to now.

    Loss and norm are those of the whole mesh, the same on every rank, so all ranks skip the same steps.
    """

    mode: Literal["stop", "skip"]
    count: int = 0
    in_a_row: int = 0

    def judge(self, **values: float) -> str:
        """Why a step with these values must not reach the weights; empty where all are finite."""
        found = not_finite(**values)
        self.in_a_row = self.in_a_row + 1 if found else 0
        self.count += bool(found)
        return found

    def check(self, step: int, found: str) -> None:
        """Raise RunError if what `judge` found in `step` ends the run.

        It does with mode "stop", and at the last of too many skipped steps in a row.
        """
        if found and self.mode == "stop":
            raise _stopped(step, found)
        if self.in_a_row == IN_A_ROW:
            raise RunError(
                f"steps {step - IN_A_ROW + 1} to {step}: {found} at the last",
                f"{IN_A_ROW} steps in a row were skipped, which no batch explains",
                f"Go on from the last checkpoint with --resume. {_REMEDY}",
            )


def not_finite(**values: float) -> str:
    """All values in words where one is not finite; else empty."""
    if all(math.isfinite(value) for value in values.values()):
        return ""
    return ", ".join(f"{name}={value}" for name, value in values.items())


def check_finite(step: int, **values: float) -> None:
    """Raise RunError where a value is not finite."""
    if found := not_finite(**values):
        raise _stopped(step, found)


def _stopped(step: int, found: str) -> RunError:
    return RunError(
        f"step {step}: {found}",
        "these are finite numbers while a model trains",
        f"{_REMEDY}. Single steps may be skipped with train.nonfinite=skip",
    )


# ---- Saving


def _save(run: Run, step: int, skipped: int) -> Path:
    path = checkpoint_folder(run.config.output.path, step)
    state = state_after(step, run.config, skipped)
    run.writer.save(
        path, run.optimizers, state, extra=partial(_save_tokenizer, run), then=partial(_prune, run, path)
    )
    return path


def _save_tokenizer(run: Run, folder: Path) -> None:
    """Replace the tokenizer that came with the model: the run may read with another one."""
    for file in other_files(folder, TOKENIZER).values():
        file.unlink()
    run.tokenizer.save(folder)


def _prune(run: Run, written: Path) -> None:
    """Prune. A failure is a warning: it costs disk space, and not the run."""
    try:
        prune(written, run.config.output.keep)
    except OSError as error:
        run.display.say(f"penstock: warning: older checkpoints of {written.parent} were not removed: {error}")
