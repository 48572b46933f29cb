"""What a run does between two steps: it evaluates, ends after a signal, and saves."""

from __future__ import annotations

import math
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

from penstock.checkpoint.in_memory import MemoryCheckpoints
from penstock.errors import RunError
from penstock.launch.stop import PASSED_ON, Stop
from penstock.models.model_folder import TOKENIZER, other_files
from penstock.pipeline.steps.step import StepResult, accuracy_of
from penstock.train.checkpoints import best_link, checkpoint_folder, link_best, prune
from penstock.train.encoding.tokenizer import Tokenizer
from penstock.train.part import Run, RunPart, TrainStep
from penstock.train.records.metrics import MetricsRow
from penstock.train.skips import not_finite, stopped
from penstock.train.state import Ranking, ranked

_LARGEST_EXPONENT = 700.0


class HeldOutEvaluation(RunPart):
    """Evaluates before the first step, every train.evaluate_every steps, and after the last.

    A signal cuts an evaluation short, and the run that goes on begins with it.
    """

    @contextmanager
    def training(self) -> Iterator[None]:
        start = self.run.start
        if start.done == 0 or start.state.unevaluated:
            self._evaluate(start.done)
        yield

    def after(self, step: TrainStep) -> None:
        run, section = self.run, self.run.config.train
        evaluated = run.evaluates(step.number) and self._evaluate(step.number)
        run.state = run.state._replace(unevaluated=run.evaluates(step.number) and not evaluated)
        if not evaluated or step.number == section.last or section.early_stop is None:
            return
        early = run.state.best.ends(section.early_stop)
        if run.pipe.reductions.max(int(bool(early))):  # losses may differ by rounding; all ranks end together
            why = early or "another rank finds no improvement"
            step.ended = f"early, after step {step.number} of {section.last}: {why}"
            step.stopped = False  # a signal in this step changes nothing

    def _evaluate(self, step: int) -> bool:
        """Evaluate after this step. Returns whether no signal came."""
        run = self.run
        state, row = run.state, self.evaluation(step)
        if row is None:
            run.display.say(f"step {step}/{run.config.train.last}  a signal cut its evaluation short")
            return False
        score = run.config.output.keep.score(row)  # before the first step it raises its error, if any
        best = state.best.after(step, row["held_out_loss"], run.config.train.early_stop)
        run.state = state._replace(best=best)
        if step:  # before the first one there is nothing to save
            ranking = ranked(state.ranking, step, score, run.config.kept_best)
            run.state = run.state._replace(ranking=ranking)
        return True

    def evaluation(self, step: int) -> MetricsRow | None:
        """Write, show and return the mean loss a token over the held-out batches, in nats, and more.

        None if a signal came before the last batch. Raises RunError if the loss is not finite.
        """
        run, started, results = self.run, time.perf_counter(), list[StepResult]()
        for batch in run.steps.data.held_out_batches(run.config.train.evaluate_batches):
            if any(run.pipe.reductions.asked):  # the same on all ranks
                return None
            results.append(run.evaluate(run.prepare(batch).content))
        tokens = sum(result.tokens for result in results)
        loss = sum(result.loss * result.tokens for result in results) / tokens
        if reason := not_finite(held_out_loss=loss):
            raise stopped(step, reason)
        seconds = time.perf_counter() - started
        row: MetricsRow = {"step": step, "held_out_loss": loss, **self._more(step, loss), "tokens": tokens,
                           "seconds": seconds}  # fmt: skip
        if (accuracy := accuracy_of(results)) is not None:
            row[f"held_out_{run.config.data.accuracy}"] = accuracy
        for part in run.parts:
            row |= part.evaluated()
        run.log.write(row)
        run.display.say(f"step {step}/{run.config.train.last}  held-out loss {loss:.4f} {_unit(run)}")
        return row

    def _more(self, step: int, loss: float) -> MetricsRow:
        """The perplexity, where the loss is the cross-entropy alone and the number has a float; the epoch."""
        section, epoch = self.run.config.train, self.run.steps.data.epochs_after(step)
        more: MetricsRow = {} if epoch is None else {"epoch": epoch}
        if (
            section.loss is None
            and self.run.config.data.labels in ("next tokens", "masked tokens")
            and section.label_smoothing == section.z_loss == 0
            and loss < _LARGEST_EXPONENT
        ):
            more["perplexity"] = math.exp(loss)
        return more


def _unit(run: Run) -> str:
    loss, labels = run.config.train.loss, run.config.data.labels
    if labels == "rows":
        return "a label"
    return "nats a token" if loss is None else f"a {loss.item} ({loss.kind})"


class SignalsWait(RunPart):
    """From before the first evaluation on, a signal ends the run after a step, and not the process at once.

    Args:
        stop: the signals that this process got
    """

    def __init__(self, run: Run, stop: Stop) -> None:
        super().__init__(run)
        self._stop = stop
        run.pipe.reductions.asks = lambda: stop.number  # each step and evaluation sends it to all processes

    def training(self) -> AbstractContextManager[None]:
        """Catch signals. After the first one the run ends within train.stop_seconds, or with an error."""
        seconds = self.run.config.train.stop_seconds
        late = RunError(
            f"train.stop_seconds={seconds:g}",
            "a signal asked the run to stop, and it has not written its checkpoint within this time",
            "One before it, if there is one, is whole. Give more seconds, and set as long a grace period "
            "where the signal comes from",
        )
        return self._stop.saves(seconds, late)


class Signals(RunPart):
    """Ends the run if one of its processes got a signal to save and to end."""

    def after(self, step: TrainStep) -> None:
        """End the run, with a reason that names the signal and who got it. Collective after a signal."""
        run, asked = self.run, self.run.pipe.reductions.asked
        if step.ended or not any(asked):
            return
        hosts = run.pipe.ranks.gather(socket.gethostname())
        ranks = enumerate(zip(asked, hosts, strict=True))
        got = [f"rank {rank} on {host}" for rank, (received, host) in ranks if received]
        who = f"all {len(asked)} ranks" if len(got) == len(asked) > 1 else ", ".join(got)
        passed_on, received = divmod(max(asked), PASSED_ON)
        who = "the launcher" if passed_on else who
        name = signal.Signals(received).name
        step.ended = f"after step {step.number} of {run.config.train.last}: {who} got {name}"
        step.stopped = True


class Checkpoints(RunPart):
    """Saves a checkpoint every train.checkpoint_every steps and when the run ends, in the background.

    An evaluation that is one of the best, as many as output.keep.best says, is saved too.
    """

    def __init__(self, run: Run, tokenizer: Tokenizer) -> None:
        super().__init__(run)
        self._tokenizer = tokenizer

    def running(self) -> AbstractContextManager[object]:
        return self.run.writer

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Raise RunError before a step if another run has taken the folder over, or the last write failed."""
        if self.run.owner is not None:
            self.run.owner.check()
        self.run.writer.check()
        yield

    def keep(self, step: TrainStep) -> None:
        every = self.run.config.train.checkpoint_every
        if step.ended or (every and step.number % every == 0) or self._is_one_of_the_best(step.number):
            self.run.checkpoint = self.save(step)

    def _is_one_of_the_best(self, step: int) -> bool:
        """Whether the evaluation after this step is, on any rank: losses may differ by rounding."""
        run = self.run
        if not run.config.kept_best or not run.evaluates(step):
            return False
        return bool(run.pipe.reductions.max(int(step in _steps(run.state.ranking))))

    def save(self, step: TrainStep) -> Path:
        """Save, and write a row with the seconds that training waited; the run's end waits for the write."""
        run, started = self.run, time.perf_counter()
        path, state = checkpoint_folder(run.config.output.path, step.number), run.state_after(step)()
        prune_older = partial(self._prune, path, _steps(run.state.ranking))
        run.writer.save(path, run.optimizers, state, extra=self._save_tokenizer, then=prune_older)
        if step.ended:
            run.writer.wait()
        seconds = time.perf_counter() - started
        run.log.write({"step": step.number, "checkpoint": path.name, "seconds": seconds})
        return path

    def _save_tokenizer(self, folder: Path) -> None:
        """Replace the tokenizer that came with the model: the run may read with another one."""
        for file in other_files(folder, TOKENIZER).values():
            file.unlink()
        self._tokenizer.save(folder)

    def _prune(self, written: Path, best: Sequence[int]) -> None:
        """Link the best checkpoint, and prune. A failure is a warning: it costs disk space, and not the run.

        best: the steps that stay for their evaluation, the best one first
        """
        run = self.run
        assert run.owner is not None
        run.owner.check()
        try:
            if best:
                link_best(run.config.output.path, best[0])
            prune(written, run.owner.run, run.config.output.keep, best, run.config.train.checkpoint_every)
        except OSError as error:
            run.display.say(
                f"penstock: warning: older checkpoints of {written.parent} were not removed: {error}"
            )

    def summary(self) -> Iterator[str]:
        """The best checkpoint, if the run keeps it."""
        output = self.run.config.output.path
        for score, step in self.run.state.ranking[:1]:
            link, path = best_link(output), checkpoint_folder(output, step)
            if link.resolve() == path.resolve():
                yield f"best        {link}: {path.name}, {_scored(self.run, score)}"


def _scored(run: Run, score: float) -> str:
    """The metric of the ranking, with its value."""
    metric = run.config.output.keep.metric
    if metric == "held_out_loss":
        return f"held-out loss {score:.4f} {_unit(run)}"
    return f"{metric.removeprefix('held_out_').replace('_', ' ')} {-score:.4f}"


def _steps(ranking: Ranking) -> tuple[int, ...]:
    return tuple(step for _, step in ranking)


class InMemoryCheckpoints(RunPart):
    """Keeps the state in memory every train.memory_checkpoint_every steps, until the run's end."""

    def __init__(self, run: Run, memory: MemoryCheckpoints) -> None:
        super().__init__(run)
        self._memory = memory
        self._seconds = 0.0  # that training has waited for them since the last row

    def running(self) -> AbstractContextManager[object]:
        return self._memory

    def _is_kept(self, step: int) -> bool:
        every = self.run.config.train.memory_checkpoint_every
        return every is not None and step % every == 0

    def computed(self, step: int) -> None:
        """Wait for the copies of the weights, which change next; before a save also for the exchange."""
        with self._timed():
            self._memory.settle(exchanged=self._is_kept(step))

    @contextmanager
    def _timed(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - started

    def row(self, step: TrainStep) -> MetricsRow:
        """The seconds that training has waited for them since the row before."""
        seconds, self._seconds = self._seconds, 0.0
        return {"memory_checkpoint_seconds": seconds}

    def check(self, step: TrainStep) -> None:
        if step.back_to is not None:
            self._memory.go_back()

    def keep(self, step: TrainStep) -> None:
        if self._is_kept(step.number) and not step.ended:
            run = self.run
            with self._timed():
                self._memory.save(step.number, run.state_after(step), run.log.under_way)

    def end(self) -> None:
        self._memory.remove()
