"""Start the ranks of `penstock train` on this machine, and start them again after a failure."""

from __future__ import annotations

import sys
from pathlib import Path

from penstock.checkpoint.shards import newest_in
from penstock.launch.restarts import Saved, keep_running
from penstock.launch.server import Rehearsal
from penstock.launch.start import Launcher, Server
from penstock.train.checkpoints import NEWEST, newest_checkpoint
from penstock.train.owner import last_run
from penstock.train.planned import as_overrides
from penstock.train.preflight import Prepared
from penstock.train.state import read_state

_SHARED = ("penstock", "torch", "transformers", "safetensors", "numpy", "rich", "peft")


def start_ranks(
    server: Server, prepared: Prepared, config: Path, overrides: list[str], resume: str | None, restarts: int
) -> int:
    """Run `penstock train` on each rank of the run. Returns the exit code.

    Args:
        config, overrides, resume: as the command got them
        restarts: failures in a row, without a new checkpoint in between, after which the run starts again
    """
    settings, ranks = prepared.config, prepared.plan.schedule.ranks * prepared.axes.ranks_per_stage
    if (commit := settings.model.commit) is not None:  # ranks must not use a later one
        overrides = [*overrides, f"model.commit={commit!r}"]
    if prepared.choice:
        print(prepared.choice, flush=True)
        overrides = [*overrides, *as_overrides(settings)]
    # the ranks will need the modules that the preflight has imported here, and its traces of the model
    server.follow(_SHARED)
    server.rehearse(Rehearsal("penstock.train.rehearsal", "rehearse", settings))
    output, train = settings.output.path, settings.train
    goes_on = _GoesOn(resume, output, train.last)

    def command(attempt: int) -> list[str]:
        resumed = [] if goes_on.at is None else ["--resume", *([] if goes_on.at == NEWEST else [goes_on.at])]
        # -P: else the ranks, unlike this process, would import modules from the working folder
        return [sys.executable, "-P", "-m", "penstock", "train", str(config), *overrides, *resumed]

    with Launcher(server, train.stop_seconds) as launcher:
        if not restarts:
            return launcher.attempt(ranks, command(0)).code
        return keep_running(launcher, ranks, command, restarts, goes_on.saved, output)


class _GoesOn:
    """Where the next attempt starts: at the newest checkpoint of an attempt, else where the first started."""

    def __init__(self, resume: str | None, output: Path, steps: int) -> None:
        self.at, self._output, self._steps = resume, output, steps
        self._before, self._in_memory_before = self._newest(), self._in_memory()

    def saved(self) -> Saved:
        newest, in_memory = self._newest(), self._in_memory()
        if newest is not None and newest != self._before:  # an unchanged one may be another run's
            self.at = NEWEST
        if in_memory is None or in_memory == self._in_memory_before:
            return self._on_disk(newest)
        self.at = NEWEST
        return max(self._on_disk(newest), in_memory)

    def _on_disk(self, newest: tuple[Path, int] | None) -> Saved:
        path = None
        if self.at == NEWEST:
            path = newest[0] if newest is not None else None
        elif self.at is not None:
            path = Path(self.at).expanduser()
        if path is None:
            return Saved()
        step = read_state(path).step
        return Saved(step, last=step >= self._steps)

    def _in_memory(self) -> Saved | None:
        run = last_run(self._output)
        newest = None if run is None else newest_in(run)
        return None if newest is None else Saved(newest[0])

    def _newest(self) -> tuple[Path, int] | None:
        path = newest_checkpoint(self._output).path
        return None if path is None else (path, path.stat().st_mtime_ns)
