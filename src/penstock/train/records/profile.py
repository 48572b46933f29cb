"""torch's profiler over some steps of a run: one Chrome trace a process, for Perfetto or chrome://tracing."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from penstock.private import ExperimentalConfig
from penstock.train.config.sections import TrainSection


class StepProfiler:
    """Profiles the steps of `train.profile`, and writes the trace when the last of them has ended.

    As a context manager it stops after an error, without a trace.

    Args:
        output: the folder that gets `profile/rank-0.json.gz`, and one of each other process
        say: shows a line
    """

    def __init__(
        self, section: TrainSection, output: Path, device: torch.device, say: Callable[[str], None]
    ) -> None:
        asked = section.profile
        self._steps = range(0) if asked is None else range(asked.steps[0], asked.steps[1] + 1)
        rank = dist.get_rank() if dist.is_initialized() else 0
        self._path = output / "profile" / f"rank-{rank}.json.gz"
        self._activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            self._activities.append(ProfilerActivity.CUDA)
        self._say = say
        self._profile: profile | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._profile is not None:
            self._profile.stop()

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Around a step."""
        if step not in self._steps:
            yield
            return
        if self._profile is None:
            self._profile = self._start()
        with record_function(f"step {step}"):
            yield
        if step == self._steps[-1]:
            self._write()

    def _start(self) -> profile:
        # else the profiler sees this thread only, and not that of the next batch
        every_thread = ExperimentalConfig(profile_all_threads=True)
        # acc_events: without it torch 2.11 warns of a second cycle at the start of the first
        started = profile(activities=self._activities, experimental_config=every_thread, acc_events=True)
        started.start()
        return started

    def _write(self) -> None:
        """Write the trace. A failure is a warning: it costs the trace, and not the run."""
        assert self._profile is not None
        ended, self._profile = self._profile, None
        ended.stop()
        try:
            self._path.parent.mkdir(exist_ok=True)
            ended.export_chrome_trace(str(self._path))
        except OSError as error:
            warnings.warn(f"the profile was not written: {error}", RuntimeWarning, stacklevel=1)
        else:
            self._say(f"profile of steps {self._steps[0]} to {self._steps[-1]}: {self._path.parent}")


def profile_note(section: TrainSection, done: int) -> str:
    """What a run that goes on after step `done` cannot profile any more, in words; else empty."""
    if section.profile is None or done < section.profile.steps[0]:
        return ""
    first, last = section.profile.steps
    rest = f"the trace begins with step {done + 1}" if done < last else "nothing is profiled"
    return f"train.profile.steps=[{first}, {last}]: the run goes on after step {done}, so {rest}"
