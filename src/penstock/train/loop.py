"""The training loop, from the first evaluation to the last checkpoint."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.optim import AdamW

from penstock.checkpoint import CheckpointWriter
from penstock.errors import RunError
from penstock.models.source import TOKENIZER, beside
from penstock.pipeline import Pipeline
from penstock.schedule import Timeline
from penstock.train.checkpoint import checkpoint_folder, prune, state_after
from penstock.train.config import TrainConfig
from penstock.train.data import Data
from penstock.train.display import Display
from penstock.train.metrics import Metrics, Row
from penstock.train.optim import learning_rate, set_learning_rate
from penstock.train.rows import Fill
from penstock.train.tokenizer import Tokenizer


@dataclass(frozen=True)
class Run:
    """All that the loop works with. `done` steps lie behind; only process 0 has metrics."""

    config: TrainConfig
    pipe: Pipeline
    data: Data
    optimizer: AdamW
    tokenizer: Tokenizer
    display: Display
    metrics: Metrics | None
    writer: CheckpointWriter
    done: int = 0

    @property
    def output(self) -> Path:
        return Path(self.config.output.folder).expanduser()


@dataclass(frozen=True)
class Outcome:
    """What a finished run leaves: its last checkpoint, what its last step really did, all steps' fill."""

    checkpoint: Path
    timeline: Timeline
    fill: Fill


def train(run: Run) -> Outcome:
    """Train from step `done` + 1 to the last. Collective. Raises RunError where the loss is not finite."""
    section = run.config.train
    if run.done == 0:
        _evaluate(run, 0)
    fill = Fill()
    for step in range(run.done + 1, section.steps + 1):
        fill += _step(run, step)
        if step % section.evaluate_every == 0 or step == section.steps:
            _evaluate(run, step)
        if step == section.steps or (section.checkpoint_every and step % section.checkpoint_every == 0):
            path = _save(run, step)
    run.writer.wait()
    return Outcome(path, run.pipe.timeline, fill)


def _save(run: Run, step: int) -> Path:
    path = checkpoint_folder(run.output, step)
    state = state_after(step, run.config)
    run.writer.save(
        path, run.optimizer, state, extra=partial(_save_tokenizer, run), then=partial(_prune, run, path)
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


def seed_step(seed: int, step: int, process: int) -> None:
    """Make what a step draws at random (dropout) follow from the step: a resumed run needs no state of it."""
    torch.manual_seed(int(np.random.SeedSequence((seed, step, process)).generate_state(1)[0]))


def _step(run: Run, step: int) -> Fill:
    section = run.config.train
    started = time.perf_counter()
    seed_step(section.seed, step, run.pipe.processes.index)
    rate = learning_rate(run.config.optimizer, section.steps, step)
    set_learning_rate(run.optimizer, rate)
    run.optimizer.zero_grad()
    batch = run.data.batch(step)
    result = run.pipe.step(batch.content)
    norm = run.pipe.clip_grad_norm_(section.clip_norm or math.inf)
    _check_finite(step, loss=result.loss, grad_norm=norm)
    run.optimizer.step()
    seconds = time.perf_counter() - started
    row: Row = {
        "step": step,
        "loss": result.loss,
        "learning_rate": rate,
        "grad_norm": norm,
        "tokens": result.tokens,
        "tokens_per_second": result.tokens
        / seconds,  # those that the loss counts, which padding is not among
        "padding": batch.fill.padding,
        "bubble": result.bubble,
        "seconds": seconds,
    }
    run.display.step(row)
    if run.metrics:
        run.metrics.write(row)
    return batch.fill


def _check_finite(step: int, **values: float) -> None:
    """Before the optimizer spoils the weights with it."""
    if not all(math.isfinite(value) for value in values.values()):
        raise RunError(
            f"step {step}: {', '.join(f'{name}={value}' for name, value in values.items())}",
            "these are finite numbers while a model trains",
            "Lower optimizer.learning_rate, lengthen optimizer.warmup_steps, or use model.dtype=float32",
        )


def _evaluate(run: Run, step: int) -> None:
    """Mean loss a token over the held-out batches."""
    started = time.perf_counter()
    batches = run.data.held_out_batches(run.config.train.evaluate_batches)
    results = [run.pipe.evaluate(batch.content) for batch in batches]
    tokens = sum(result.tokens for result in results)
    loss = sum(result.loss * result.tokens for result in results) / tokens
    _check_finite(step, held_out_loss=loss)
    if run.metrics:
        seconds = time.perf_counter() - started
        run.metrics.write({"step": step, "held_out_loss": loss, "tokens": tokens, "seconds": seconds})
    run.display.say(f"step {step}/{run.config.train.steps}  held-out loss {loss:.4f} nats a token")
