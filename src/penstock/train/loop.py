"""The training loop, from the first evaluation to the last checkpoint.

evaluate                                         before the first step, every evaluate_every, at the end; with
                early_stop it may be the end
for each step:  batch -> pipe.step -> clip -> optimizers, unless loss or norm is not finite; several calls of
                pipe.step with accumulate
                meanwhile one thread makes the next batch, and one writes the row of the step before
                after a spike of the loss the run may go back to its last checkpoint, and on with new rows
save                                             every checkpoint_every, at the end; in the background
keep in memory                                   every memory_checkpoint_every, but not at the end; meanwhile
                                                 the next step begins, up to the gradient norm

A signal to any process ends the run on all of them after the same step, with a checkpoint.
"""

from __future__ import annotations

import math
import signal
import socket
import time
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.autograd.profiler import record_function
from torch.optim import Optimizer

from penstock.checkpoint.in_memory import MemoryCheckpoints
from penstock.checkpoint.save_load import CheckpointWriter, load_checkpoint
from penstock.errors import RunError
from penstock.launch.stop import PASSED_ON, Stop
from penstock.models.model_folder import TOKENIZER, other_files
from penstock.pipeline.pipeline import Pipeline
from penstock.pipeline.steps.step import StepResult
from penstock.runtime.rng import generator_of
from penstock.train.checkpoints import Start, checkpoint_folder, prune, read_state, state_after
from penstock.train.config.sections import TrainConfig
from penstock.train.data.loading import Data, LoadedBatch
from penstock.train.data.rows import Fill
from penstock.train.early_stop import BestEvaluation
from penstock.train.encoding.tokenizer import Tokenizer
from penstock.train.optimizers.optimizer import learning_rates, set_learning_rates
from penstock.train.optimizers.rates import learning_rate
from penstock.train.owner import Owner
from penstock.train.records.metrics import Display, Log, Metrics, MetricsRow
from penstock.train.records.outcome import Outcome
from penstock.train.records.profile import StepProfiler
from penstock.train.records.record import write_timeline
from penstock.train.records.slow_ranks import SlowRanks
from penstock.train.records.throughput import Throughput
from penstock.train.sizes import Size, calls_of
from penstock.train.spikes import Seen, Spikes

_MEASURED = 3  # the step of each start in which GPUs are measured
IN_A_ROW = 10  # skipped steps, after which the weights and not the batches are to blame
_REMEDY = "Lower optimizer.learning_rate, lengthen optimizer.warmup_steps, or use train.precision=float32"


@dataclass(frozen=True)
class Run:
    """What the loop works with.

    metrics, owner, slow_ranks: on the first process only; stop: what signals ask of it
    """

    config: TrainConfig
    pipe: Pipeline
    data: Data
    optimizers: list[Optimizer]
    tokenizer: Tokenizer
    display: Display
    metrics: Metrics | None
    throughput: Throughput
    writer: CheckpointWriter
    start: Start
    owner: Owner | None
    stop: Stop
    memory: MemoryCheckpoints | None = None
    slow_ranks: SlowRanks | None = None


def train(run: Run) -> Outcome:
    """Train from the step after `run.start` to the last one, or to one after a signal. Collective.

    Raises: RunError where loss or gradients are not finite, unless such steps are to be skipped.
    """
    run.pipe.reductions.asks = lambda: run.stop.number
    seconds = run.config.train.stop_seconds
    with run.stop.saves(seconds, _too_late(seconds)):
        return _train(run)


def _too_late(seconds: float) -> RunError:
    return RunError(
        f"train.stop_seconds={seconds:g}",
        "a signal asked the run to stop, and it has not written its checkpoint within this time",
        "The checkpoint before is whole. Give more seconds, and so long a grace period to whatever sends the "
        "signal",
    )


def _train(run: Run) -> Outcome:
    section = run.config.train
    best = run.start.best
    if run.start.done == 0:
        best = best.after(0, _evaluate(run, 0), section.early_stop)
    fill, skips, ended = Fill(), Skips(section.nonfinite, run.start.skipped), ""
    spikes = Spikes(section.spike, run.start.seen, run.start.checkpoint)
    steps = Steps(run.data, run.start.done, section.steps, run.pipe.device)
    profiler = StepProfiler(section, run.config.output.path, run.pipe.device, run.display.say)
    with Log(run.display, run.metrics) as log, closing(steps), profiler:
        for step in steps:
            with profiler.step(step), _measured(run, step):
                batch = _step(run, step, steps, skips, spikes, log)
            fill += batch.fill
            if spikes.rewinding:
                log.flush()
                best = _go_back(run, step, batch, steps, skips, spikes)
                run = replace(run, data=steps.data)
                continue
            if step % section.evaluate_every == 0 or step == section.steps:
                log.flush()
                if run.metrics:
                    write_timeline(run.config.output.path, step, run.pipe.timeline)
                best = best.after(step, _evaluate(run, step), section.early_stop)
                ended = _ended(run, step, best)
            stopped = "" if ended else _stopped_by(run, step)
            ended = ended or stopped
            if ended or (section.checkpoint_every and step % section.checkpoint_every == 0):
                log.flush()
                path = _save(run, step, skips.count, batch, best, spikes, last=bool(ended))
            if ended:
                break
            if run.memory is not None and _is_kept(run, step):
                state = partial(_state, run, step, skips.count, batch, best, spikes.seen)
                run.memory.save(step, state, log.under_way)
    run.writer.wait()
    return Outcome(step, path, run.pipe.timeline, fill, skips.count, ended, bool(stopped), spikes.seen)


class Steps:
    """The steps to come, each with its batch, which a thread makes while the step before runs."""

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
        """The batch of the step, once."""
        assert self._batches is not None
        return next(self._batches)

    def close(self) -> None:
        """End the thread."""
        if self._batches is not None:
            self._batches.close()


def _measured(run: Run, step: int) -> AbstractContextManager[None]:
    """Let a step, once layers are compiled, measure what GPUs take for ops, if they wait for their hosts."""
    if step == run.start.done + _MEASURED and run.pipe.timeline.host_share is None:
        return run.pipe.measuring_device()
    return nullcontext()


def _ended(run: Run, step: int, best: BestEvaluation) -> str:
    """Why the run ends after `step`, in words; empty where it goes on. Collective over a mesh."""
    section = run.config.train
    early = best.ends(section.early_stop)
    if step == section.steps:
        return f"after step {step}, the last"
    if run.pipe.reductions.max(int(bool(early))):  # rounding may differ between ranks, and all end together
        return f"early, after step {step} of {section.steps}: {early or 'another rank finds no improvement'}"
    return ""


def _stopped_by(run: Run, step: int) -> str:
    """The signals that end the run after `step`, and who got them; empty where none came. Collective then."""
    asked = run.pipe.reductions.asked
    if not any(asked):
        return ""
    hosts = run.pipe.ranks.gather(socket.gethostname())
    ranks = enumerate(zip(asked, hosts, strict=True))
    got = [f"rank {rank} on {host}" for rank, (number, host) in ranks if number]
    who = f"all {len(asked)} ranks" if len(got) == len(asked) > 1 else ", ".join(got)
    passed_on, number = divmod(max(asked), PASSED_ON)
    who = "the launcher" if passed_on else who
    return f"after step {step} of {run.config.train.steps}: {who} got {signal.Signals(number).name}"


def _step(run: Run, step: int, steps: Steps, skips: Skips, spikes: Spikes, log: Log) -> LoadedBatch:
    """Train one step, unless its loss or gradients forbid it, and log its row. Returns its batch, empty."""
    section, optimizer_section = run.config.train, run.config.optimizer
    if run.owner is not None:
        run.owner.check()
    run.writer.check()
    stopwatch = Stopwatch()
    seed_step(run.pipe, section.seed, step)
    taken = step - skips.count  # skipped steps do not count for the rate
    set_learning_rates(optimizer_section, run.optimizers, section.steps, taken)
    run.pipe.zero_grad()
    with record_function("data"):
        batch = steps.batch()
    stopwatch.lap("data")
    size = run.data.sizes.at(step)
    result, norm, rose = _gradients(run, step, batch, size, stopwatch, spikes.limit)
    if run.pipe.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(run.pipe.device)  # a row has the most since the row before
    judged = {"loss": result.loss, "grad_norm": norm}
    spiked = "" if not_finite(**judged) else spikes.judge(result.loss, rose)
    reason, ranks = skips.judge(spiked, **judged), ""
    if reason:
        ranks = "" if spiked else run.pipe.find_not_finite() or run.pipe.not_finite
        run.pipe.zero_grad()
    else:
        for optimizer in run.optimizers:
            optimizer.step()
        stopwatch.lap("optimizer")
    row: MetricsRow = {
        "step": step,
        "learning_rate": learning_rate(
            optimizer_section, optimizer_section.learning_rate, section.steps, taken
        ),
        **_measurements(run, batch.fill, size, result, norm, stopwatch),
        **_rates_by_group(run, taken),
        **_events(run, batch.fill, reason, skips, spikes),
    }
    log.step(row)
    skips.check(step, reason, ranks, spike=bool(spiked))
    return batch._replace(content=[])  # tensors may be large, on a GPU too


def _gradients(
    run: Run, step: int, batch: LoadedBatch, size: Size, stopwatch: Stopwatch, largest: float
) -> tuple[StepResult, float, bool]:
    """Run the pipeline's calls, and clip.

    Returns the result, the norm, and whether the loss is above `largest`.
    """
    pipe = run.pipe
    *calls, last = calls_of(batch.content, size.calls, run.config.pipeline.microbatches)
    run_call = partial(pipe.step, total_tokens=pipe.count_tokens(*calls, last)) if calls else pipe.step
    results = [run_call(call) for call in (*calls, last)]
    stopwatch.lap("step")
    _settle(run, step)
    norm = pipe.clip_grad_norm_(run.config.train.clip_norm or math.inf)
    stopwatch.lap("clip")
    result = StepResult(
        sum(result.loss for result in results),
        sum(result.tokens for result in results),
        sum(result.bubble for result in results) / len(results),
        host_share=results[-1].host_share,
    )
    return result, norm, result.loss > largest


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


def _measurements(
    run: Run, fill: Fill, size: Size, result: StepResult, norm: float, stopwatch: Stopwatch
) -> MetricsRow:
    """What the row of every step has. A number that is not finite is None there."""
    seconds = stopwatch.total
    return {
        "loss": result.loss if math.isfinite(result.loss) else None,
        "grad_norm": norm if math.isfinite(norm) else None,
        "rows": size.rows,
        "tokens": result.tokens,
        "tokens_per_second": result.tokens / seconds,  # tokens that the loss counts, so without padding
        "padding": fill.padding,
        "bubble": result.bubble,
        **({} if result.host_share is None else {"host_share": result.host_share}),
        "seconds": seconds,
        "seconds_by_part": stopwatch.parts,
        **run.throughput.row(fill, seconds, run.pipe.peak_memory, run.pipe.device),
    }


def _rates_by_group(run: Run, taken: int) -> MetricsRow:
    """The learning rate of each group after `taken` steps, where there are several groups."""
    rates = learning_rates(run.config.optimizer, run.config.train.steps, taken)
    return {"learning_rates": rates} if len(rates) > 1 else {}


def _events(run: Run, fill: Fill, reason: str, skips: Skips, spikes: Spikes) -> MetricsRow:
    """What only some rows have. Shows slow ranks, too.

    reason: why the step was skipped; empty where it was not
    """
    row: MetricsRow = {}
    if reason:
        row["skipped"] = reason
    if spikes.rewinding and spikes.checkpoint is not None:
        row["back_to"] = spikes.checkpoint.name
    if skips.count:
        row["skipped_steps"] = skips.count
    if spikes.seen.left_out:
        row["rows_left_out"] = spikes.seen.rows
    if run.slow_ranks is not None and (slow := run.slow_ranks.judge(run.pipe, fill)):
        row["slow_ranks"] = slow
        for each in slow:
            run.display.say(run.slow_ranks.words(each))
    return row


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


def _evaluate(run: Run, step: int) -> float:
    """Write and show the mean loss a token over the held-out batches, and return it."""
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
    return loss


# ---- Steps whose loss or gradient norm is not finite


@dataclass
class Skips:
    """How many steps were skipped: in all, and in a row up to now.

    Loss and norm are those of the whole mesh, the same on every rank, so all ranks skip the same steps.
    """

    mode: Literal["stop", "skip"]
    count: int = 0
    in_a_row: int = 0

    def judge(self, spike: str = "", **values: float) -> str:
        """Why a step with these values must not reach the weights; empty where it may.

        spike: why its loss, which is finite, is too large
        """
        reason = spike or not_finite(**values)
        self.in_a_row = self.in_a_row + 1 if reason else 0
        self.count += bool(reason)
        return reason

    def check(self, step: int, reason: str, ranks: str = "", *, spike: bool = False) -> None:
        """Raise RunError if what `judge` found in `step` ends the run.

        Args:
            ranks: whose gradients are not finite, and which
            spike: whether it found one

        It does with mode "stop", but for a spike, and at the last of too many skipped steps in a row.
        """
        if self.mode == "stop" and reason and not spike:
            raise _stopped(step, reason, ranks)
        if self.in_a_row == IN_A_ROW:
            odd = f"; at the last the gradients of {ranks} were not finite" if ranks else ""
            raise _named(
                RunError(
                    f"steps {step - IN_A_ROW + 1} to {step}: {reason} at the last",
                    f"{IN_A_ROW} steps in a row were skipped, which no batch explains{odd}",
                    f"Go on from the last checkpoint with --resume. {_REMEDY}",
                ),
                ranks,
            )


def not_finite(**values: float) -> str:
    """All values in words where one is not finite; else empty."""
    if all(math.isfinite(value) for value in values.values()):
        return ""
    return ", ".join(f"{name}={value}" for name, value in values.items())


def check_finite(step: int, **values: float) -> None:
    """Raise RunError where a value is not finite."""
    if reason := not_finite(**values):
        raise _stopped(step, reason)


def _stopped(step: int, reason: str, ranks: str = "") -> RunError:
    rule = "these are finite numbers while a model trains"
    return _named(
        RunError(
            f"step {step}: {reason}",
            f"{rule}, and so are gradients: not those of {ranks}" if ranks else rule,
            f"{_REMEDY}. Single steps may be skipped with train.nonfinite=skip",
        ),
        ranks,
    )


def _named(error: RunError, ranks: str) -> RunError:
    """Mark an error that names its ranks, so that the report does not name the raising rank as well."""
    error.names_rank = bool(ranks)
    return error


# ---- Spikes of the loss


def _go_back(
    run: Run, step: int, batch: LoadedBatch, steps: Steps, skips: Skips, spikes: Spikes
) -> BestEvaluation:
    """Go back to the last checkpoint, and on from there with the rows that follow those of `step`.

    Collective. Returns the best evaluation of then. Raises RunError where the run has come back too often,
    and what `load_checkpoint` and `Data.without` raise.
    """
    run.writer.wait()
    if run.memory is not None:
        run.memory.go_back()
    assert spikes.checkpoint is not None
    load_checkpoint(spikes.checkpoint, run.pipe, run.optimizers, learning_rates=False)
    state = read_state(spikes.checkpoint)
    done = state["step"]
    data, left_out = steps.data.without(done, step, batch.position, run.config.train.steps)
    spikes.went_back(step, state, (left_out.start, left_out.stop))
    skips.count, skips.in_a_row = state["skipped"], 0
    steps.restart(data, done)
    rows = f"rows {left_out.start:,} to {left_out.stop - 1:,}"
    run.display.say(f"step {step}: back to step {done}, and on from there without {rows} of the run")
    best: BestEvaluation = state["best"]
    return best


# ---- Saving


def _save(
    run: Run, step: int, skipped: int, batch: LoadedBatch, best: BestEvaluation, spikes: Spikes, *, last: bool
) -> Path:
    """Save, and write a row with the seconds that training waited; after the last step it waits for all."""
    started = time.perf_counter()
    path = checkpoint_folder(run.config.output.path, step)
    state = _state(run, step, skipped, batch, best, spikes.seen)
    run.writer.save(
        path, run.optimizers, state, extra=partial(_save_tokenizer, run), then=partial(_prune, run, path)
    )
    spikes.saved(path)
    if last:
        run.writer.wait()
    if run.metrics:
        seconds = time.perf_counter() - started
        run.metrics.write({"step": step, "checkpoint": path.name, "seconds": seconds})
    return path


def _state(
    run: Run, step: int, skipped: int, batch: LoadedBatch, best: BestEvaluation, seen: Seen
) -> dict[str, Any]:
    """What a run goes on from after `step`, but for weights and the optimizers' state."""
    name = None if run.owner is None else run.owner.run
    return state_after(step, name, run.config, skipped, run.data.state(step, batch.position), best, seen)


def _is_kept(run: Run, step: int) -> bool:
    """Whether the state after `step` goes into memory."""
    every = run.config.train.memory_checkpoint_every
    return every is not None and step % every == 0


def _settle(run: Run, step: int) -> None:
    """Wait for what is being copied from the weights, which change next; before a save for all of it."""
    if run.memory is not None:
        run.memory.settle(exchanged=_is_kept(run, step))


def _save_tokenizer(run: Run, folder: Path) -> None:
    """Replace the tokenizer that came with the model: the run may read with another one."""
    for file in other_files(folder, TOKENIZER).values():
        file.unlink()
    run.tokenizer.save(folder)


def _prune(run: Run, written: Path) -> None:
    """Prune. A failure is a warning: it costs disk space, and not the run."""
    assert run.owner is not None
    run.owner.check()
    try:
        prune(written, run.owner.run, run.config.output.keep)
    except OSError as error:
        run.display.say(f"penstock: warning: older checkpoints of {written.parent} were not removed: {error}")
