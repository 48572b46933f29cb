"""The files that a run writes next to metrics.jsonl, for its trackers and for `penstock report`.

run.json        its id, config and environment; of each start: when its process began and when its first step
                did, after which step, the seconds of steps that it does again, and how it ended
timeline.json   when each op of one step ran, and the bytes of activations and messages that each rank held at
                most: of the last step before an evaluation, then of the last step
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from penstock.errors import RunError
from penstock.launch.stop import LAUNCHER
from penstock.models.weights.folder import UNREADABLE
from penstock.reading import read_json
from penstock.runtime.health.agreement import version_of_penstock
from penstock.runtime.health.notes import began
from penstock.schedule import Costs, Schedule, Timeline, render, simulate
from penstock.train.owner import new_run
from penstock.train.part import Run, RunPart, TrainStep
from penstock.train.records.metrics import replacing, writable
from penstock.train.records.trackers import Trackers
from penstock.train.report.lost_time import lost_time
from penstock.train.report.recorded import read_run, starts_in
from penstock.train.settings import started

RUN, TIMELINE = "run.json", "timeline.json"
_MEASURED = 3  # the step after a start in which GPUs are measured: by then layers are compiled


class RunRecord(RunPart):
    """Writes run.json when the run begins and when it ends, and feeds the trackers. On the first process."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._stopped, self._lines = "", list[str]()  # how a signal ended the run; the trackers' lines
        self._file, self._contents = run.config.output.path / RUN, dict[str, Any]()

    @contextmanager
    def training(self) -> Iterator[None]:
        """Note when the first step begins: what comes before is start-up."""
        if self.run.owner is not None:
            self._contents["starts"][-1]["at"] = _now()
            write_json(self._file, self._contents)
        yield

    @contextmanager
    def running(self) -> Iterator[None]:
        run, file = self.run, self._file
        if run.owner is None:
            yield
            return
        self._contents = contents = _with_this_start(file, run, run.owner.run)
        write_json(file, contents)
        logged = file.with_name("metrics.jsonl").stat().st_size  # its rows by now are in the trackers
        trackers = Trackers(run.config.output.trackers, file, logged, run.display.say)
        how, why = "finished", ""
        try:
            yield
            if self._stopped:
                how, why = "interrupted", self._stopped
        except BaseException as error:
            how, why = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed", str(error)
            raise
        finally:
            contents["starts"][-1]["end"] = {"at": _now(), "how": how, "why": why}
            with suppress(RunError):  # the run has an error of its own, or has done all its steps
                write_json(file, contents)
            trackers.finish(how)
            self._lines = trackers.lines

    def keep(self, step: TrainStep) -> None:
        self._stopped = step.ended if step.stopped else ""

    def summary(self) -> Iterator[str]:
        yield f"metrics     {self._file.with_name('metrics.jsonl')}"
        if time_spent := lost_time(read_run(self._file.parent)):
            yield f"time        {time_spent}"
        yield from self._lines


class StepTimeline(RunPart):
    """Writes the timeline of the last step before each evaluation, then that of the last step.

    Args:
        schedule_of: function from a number of microbatches to the schedule: a run may end within a ramp
    """

    def __init__(self, run: Run, schedule_of: Callable[[int], Schedule]) -> None:
        super().__init__(run)
        self._schedule_of = schedule_of
        self._step = 0  # the last one

    def around(self, step: int) -> AbstractContextManager[None]:
        """Measure the GPUs' own times in one step, if they wait for their hosts."""
        pipe = self.run.pipe
        if step == self.run.start.done + _MEASURED and pipe.timeline.host_share is None:
            return pipe.measuring_device()
        return nullcontext()

    def after(self, step: TrainStep) -> None:
        self._step = step.number
        if self.run.owner is not None and self.run.evaluates(step.number):
            self._write({"measured": self.run.pipe.timeline})

    def summary(self) -> Iterator[str]:
        measured = self.run.pipe.timeline
        predicted = simulate(self._schedule_of(measured.microbatches), Costs.measured(measured))
        picture = self.run.config.output.path / "timeline.svg"
        with writable(picture):
            render(measured, picture, predicted=predicted)
        self._write({"measured": measured, "predicted": predicted})
        yield f"timeline    {picture}"
        host = measured.host_share
        limit = "" if host is None else f"  the host is the limit: {host:.1%}"
        shares = f"predicted {predicted.bubble:.1%}  measured {measured.bubble:.1%}"
        yield f"bubble of the last step  {shares}{limit}"

    def _write(self, timelines: dict[str, Timeline]) -> None:
        """Raises RunError."""
        entries: dict[str, Any] = {label: timeline.to_data() for label, timeline in timelines.items()}
        entries["held"] = [held.total for held in self.run.pipe.memory]
        write_json(self.run.config.output.path / TIMELINE, {"step": self._step, **entries})


def _with_this_start(file: Path, run: Run, identity: str) -> dict[str, Any]:
    """The contents of run.json with one more start.

    A run keeps its id, which trackers use. A run that goes on in another folder gets a new id.
    """
    done, before = run.start.done, dict[str, Any]()
    if done:
        with suppress(*UNREADABLE):
            contents = read_json(file)
            before = contents if contents.get("run", identity) == identity else {}
    starts, earlier = starts_in(before), run.log.earlier
    if starts and earlier is not None and "end" not in starts[-1]:
        starts[-1]["end"] = {"at": _moment(earlier.at), "how": "killed", "why": ""}
    start = {
        "began": _moment(_began(done)), "at": _now(), "step": done,
        "again": 0.0 if earlier is None else earlier.again,
        "ranks": run.pipe.schedule.ranks, "processes": started() or 1,
    }  # fmt: skip
    return {
        "id": before.get("id") or (new_run() if done else identity),
        "run": identity,
        "config": run.config.model_dump(mode="json"),
        "environment": _environment(run.pipe.device),
        "starts": [*starts, start],
    }


def _environment(device: torch.device) -> dict[str, str]:
    facts = {
        "penstock": version_of_penstock(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "python": platform.python_version(),
        "system": platform.platform(),
        "processes": str(started() or 1),
        "CPUs": str(os.cpu_count()),
    }
    return facts | ({"GPU": torch.cuda.get_device_name(device)} if device.type == "cuda" else {})


def _began(done: int) -> float:
    """When this start began, in seconds of time.time(): with its process, or with that of its launcher.

    done: the last step before it. Earlier attempts from which nothing is left are a part of this start.
    """
    goes_on = done and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    process = os.getpid() if goes_on else int(os.environ.get(LAUNCHER) or os.getpid())
    ticks = began(process)
    if ticks is None:
        return time.time()
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


def _now() -> str:
    return _moment(time.time())


def _moment(at: float) -> str:
    return datetime.fromtimestamp(at).astimezone().isoformat(timespec="milliseconds")


def write_json(path: Path, data: object) -> None:
    """Write a file by a rename: a reader sees the old file or the new one. Raises RunError."""
    with replacing(path) as fresh:
        fresh.write_text(json.dumps(data), encoding="utf-8")
