"""The training loop.

for each step:  batch -> pipe.step -> clip -> optimizers, unless a part has a reason to skip them
                several calls of pipe.step with accumulate
                meanwhile one thread makes the next batch, and one writes the row of the step before

The run's parts (part.py) do everything else around and between the steps.
"""

from __future__ import annotations

import math
import time
from contextlib import ExitStack, closing
from functools import partial

import numpy as np
import torch
from torch.autograd.profiler import record_function

from penstock.pipeline.pipeline import Pipeline
from penstock.pipeline.steps.step import StepResult, accuracy_of
from penstock.runtime.rng import generator_of
from penstock.train.optimizers.optimizer import learning_rates, set_learning_rates
from penstock.train.optimizers.rates import learning_rate
from penstock.train.part import Run, TrainStep
from penstock.train.records.metrics import MetricsRow
from penstock.train.sizes import calls_of


def train(run: Run) -> TrainStep:
    """Train from the step after `run.start` on, until a part ends the run or the last step is done.

    Collective. Returns the last step. Raises what the parts raise, on all ranks.
    """
    with run.log, ExitStack() as training:
        for part in run.parts:
            training.enter_context(part.training())
        with closing(run.steps):
            for step_number in run.steps:
                with ExitStack() as around:
                    for part in run.parts:
                        around.enter_context(part.around(step_number))
                    step = _step(run, step_number)
                _follow(run, step)
                if step.ended:
                    break
    return step


def _follow(run: Run, step: TrainStep) -> None:
    """Call the parts between a step and the next one."""
    for part in run.parts:
        part.check(step)
    if step.back_to is not None:  # the run is at an older step by now
        return
    if step.number == run.config.train.last:
        step.ended = f"after step {step.number}, the last"
    for part in run.parts:
        part.after(step)
    for part in run.parts:
        part.keep(step)


def _step(run: Run, step_number: int) -> TrainStep:
    """Run one step, and log its row. Returns it without its batch. A part may make optimizers skip it."""
    section, pipe, stopwatch = run.config.train, run.pipe, Stopwatch()
    seed_step(pipe, section.seed, step_number)
    taken = step_number - run.state.skipped  # skipped steps do not count for the learning rate
    set_learning_rates(run.config.optimizer, run.optimizers, section.last, taken)
    pipe.zero_grad()
    with record_function("data"):
        batch = run.steps.batch()
    stopwatch.lap("data")
    batch = run.prepare(batch)
    size = run.steps.data.sizes.at(step_number)
    calls = calls_of(batch.content, size.calls, run.config.pipeline.microbatches)
    call = partial(run.step, total_tokens=pipe.count_tokens(*calls)) if len(calls) > 1 else run.step
    result = _sum([call(content) for content in calls])
    stopwatch.lap("step")
    for part in run.parts:
        part.computed(step_number)
    norm = pipe.clip_grad_norm_(section.clip_norm or math.inf)
    stopwatch.lap("clip")
    step = TrainStep(step_number, size, batch, result, norm)
    step.skipped = next(filter(None, (part.judge(step) for part in run.parts)), "")
    if step.skipped:
        run.state = run.state._replace(skipped=run.state.skipped + 1)
        pipe.zero_grad()
    else:
        for optimizer in run.optimizers:
            optimizer.step()
        stopwatch.lap("optimizer")
    step.seconds = stopwatch.total
    row = _row(run, step, taken) | {"seconds_by_part": stopwatch.parts}
    for part in run.parts:
        row |= part.row(step)
    run.log.step(row)
    step.batch = batch._replace(content=[], beside=())  # tensors may be large, on a GPU too
    return step


def _sum(results: list[StepResult]) -> StepResult:
    """The result of a step from those of its pipeline calls."""
    return StepResult(
        sum(result.loss for result in results),
        sum(result.tokens for result in results),
        sum(result.bubble for result in results) / len(results),
        host_share=results[-1].host_share,
        accuracy=accuracy_of(results),
    )


class Stopwatch:
    """Seconds of each part of a step on the host's clock. A GPU's work counts where the host waits for it."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}
        self._started = self._since = time.perf_counter()

    def lap(self, part: str) -> None:
        """End `part`, which began where the part before ended."""
        now = time.perf_counter()
        self.parts[part], self._since = now - self._since, now

    @property
    def total(self) -> float:
        """Seconds up to now."""
        return time.perf_counter() - self._started


def _row(run: Run, step: TrainStep, taken: int) -> MetricsRow:
    """The entries that the row of every step has. A value that is not finite is None.

    taken: the steps that changed weights, up to this one, which the learning rates follow
    """
    section, steps, result = run.config.optimizer, run.config.train.last, step.result
    row: MetricsRow = {
        "step": step.number,
        "learning_rate": learning_rate(section, section.learning_rate, steps, taken),
        "loss": result.loss if math.isfinite(result.loss) else None,
        "grad_norm": step.norm if math.isfinite(step.norm) else None,
        "rows": step.size.rows,
        "tokens": result.tokens,
        "tokens_per_second": result.tokens / step.seconds,  # tokens that the loss counts, without padding
        "padding": step.batch.fill.padding,
        "bubble": result.bubble,
        "seconds": step.seconds,
    }
    if result.host_share is not None:
        row["host_share"] = result.host_share
    if result.accuracy is not None:
        row[run.config.data.accuracy] = result.accuracy
    if len(rates := learning_rates(section, steps, taken)) > 1:
        row["learning_rates"] = rates
    return row


def seed_step(pipe: Pipeline, seed: int, step: int) -> None:
    """Seed the random numbers of a step from its number, so that a resumed run needs no random state.

    If the pipeline derives its draws from the seed by layer and microbatch (`Pipeline.draws`), every rank
    has the same seed. Otherwise each has its own, or a router's noise would be the same on all ranks.
    """
    rank = () if pipe.draws else (pipe.processes.index, pipe.batch_part[0])
    seeded = int(np.random.SeedSequence((seed, step, *rank)).generate_state(1)[0])
    # not torch.manual_seed: without a GPU it formats the stack each time, in case there will be one
    for generator in {torch.default_generator, generator_of(pipe.device)}:
        generator.manual_seed(seeded)
