"""What a run does between two steps: it evaluates, ends after a signal, and saves."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

from penstock.checkpoint.in_memory import MemoryCheckpoints
from penstock.errors import RunError
from penstock.launch.stop import PASSED_ON, Stop
from penstock.models.model_folder import TOKENIZER, other_files
from penstock.train.checkpoints import checkpoint_folder, prune
from penstock.train.encoding.tokenizer import Tokenizer
from penstock.train.part import Run, RunPart, TrainStep
from penstock.train.records.metrics import MetricsRow
from penstock.train.skips import not_finite, stopped


class HeldOutEvaluation(RunPart):
    """Evaluates before the first step, every train.evaluate_every steps, and after the last."""

    @contextmanager
    def training(self) -> Iterator[None]:
        if self.run.start.done == 0:
            self._evaluate(0)
        yield

    def after(self, step: TrainStep) -> None:
        run, section = self.run, self.run.config.train
        if not run.evaluates(step.number):
            return
        self._evaluate(step.number)
        if step.number == section.steps or section.early_stop is None:
            return
        early = run.state.best.ends(section.early_stop)
        if run.pipe.reductions.max(int(bool(early))):  # losses may differ by rounding; all ranks end together
            why = early or "another rank finds no improvement"
            step.ended = f"early, after step {step.number} of {section.steps}: {why}"
            step.stopped = False  # a signal in this step changes nothing

    def _evaluate(self, step: int) -> None:
        run = self.run
        best = run.state.best.after(step, self.loss(step), run.config.train.early_stop)
        run.state = run.state._replace(best=best)

    def loss(self, step: int) -> float:
        """Write, show and return the mean loss a token over the held-out batches, in nats.

        Raises RunError if it is not finite.
        """
        run, started = self.run, time.perf_counter()
        batches = run.steps.data.held_out_batches(run.config.train.evaluate_batches)
        results = [run.pipe.evaluate(batch.content) for batch in batches]
        tokens = sum(result.tokens for result in results)
        loss = sum(result.loss * result.tokens for result in results) / tokens
        if reason := not_finite(held_out_loss=loss):
            raise stopped(step, reason)
        seconds = time.perf_counter() - started
        row: MetricsRow = {"step": step, "held_out_loss": loss, "tokens": tokens, "seconds": seconds}
        for part in run.parts:
            row |= part.evaluated()
        run.log.write(row)
        run.display.say(f"step {step}/{run.config.train.steps}  held-out loss {loss:.4f} {_unit(run)}")
        return loss


def _unit(run: Run) -> str:
    loss = run.config.train.loss
    return "nats a token" if loss is None else f"a pair ({loss.kind})"


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
            "The checkpoint before is whole. Give more seconds, and set as long a grace period where the "
            "signal comes from",
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
        step.ended = f"after step {step.number} of {run.config.train.steps}: {who} got {name}"
        step.stopped = True


class Checkpoints(RunPart):
    """Saves a checkpoint every train.checkpoint_every steps and when the run ends, in the background."""

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
        if step.ended or (every and step.number % every == 0):
            self.run.checkpoint = self.save(step)

    def save(self, step: TrainStep) -> Path:
        """Save, and write a row with the seconds that training waited; the run's end waits for the write."""
        run, started = self.run, time.perf_counter()
        path, state = checkpoint_folder(run.config.output.path, step.number), run.state_after(step)()
        prune_older = partial(self._prune, path)
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

    def _prune(self, written: Path) -> None:
        """Prune. A failure is a warning: it costs disk space, and not the run."""
        run = self.run
        assert run.owner is not None
        run.owner.check()
        try:
            prune(written, run.owner.run, run.config.output.keep)
        except OSError as error:
            run.display.say(
                f"penstock: warning: older checkpoints of {written.parent} were not removed: {error}"
            )


class InMemoryCheckpoints(RunPart):
    """Keeps the state in memory every train.memory_checkpoint_every steps, until the run's end."""

    def __init__(self, run: Run, memory: MemoryCheckpoints) -> None:
        super().__init__(run)
        self._memory = memory

    def running(self) -> AbstractContextManager[object]:
        return self._memory

    def _is_kept(self, step: int) -> bool:
        every = self.run.config.train.memory_checkpoint_every
        return every is not None and step % every == 0

    def computed(self, step: int) -> None:
        """Wait for the copies of the weights, which change next; before a save also for the exchange."""
        self._memory.settle(exchanged=self._is_kept(step))

    def check(self, step: TrainStep) -> None:
        if step.back_to is not None:
            self._memory.go_back()

    def keep(self, step: TrainStep) -> None:
        if self._is_kept(step.number) and not step.ended:
            run = self.run
            self._memory.save(step.number, run.state_after(step), run.log.under_way)

    def end(self) -> None:
        self._memory.remove()
