"""torch's profiler over some steps of a run: one Chrome trace a process, for Perfetto or chrome://tracing."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch.profiler import ProfilerActivity, profile, record_function

from penstock.private import ExperimentalConfig
from penstock.train.config.training import ProfileSection
from penstock.train.part import Run, RunPart
from penstock.train.settings import own_number


class StepProfiler(RunPart):
    """Profiles the steps of `train.profile`, and writes the trace when the last of them has ended.

    Each process writes `profile/rank-0.json.gz`, by its rank, in the output folder.
    """

    def __init__(self, run: Run, section: ProfileSection) -> None:
        super().__init__(run)
        self._first, self._last = section.steps
        self._path = run.config.output.path / "profile" / f"rank-{own_number()}.json.gz"
        self._profile: profile | None = None

    @property
    def note(self) -> str:
        """The steps that a resumed run cannot profile any more."""
        first, last, done = self._first, self._last, self.run.start.done
        if done < first:
            return ""
        rest = f"the trace begins with step {done + 1}" if done < last else "nothing is profiled"
        return f"train.profile.steps=[{first}, {last}]: the run goes on after step {done}, so {rest}"

    @contextmanager
    def running(self) -> Iterator[None]:
        """Stop after an error, without a trace."""
        try:
            yield
        finally:
            if self._profile is not None:
                self._profile.stop()

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        if not self._first <= step <= self._last:
            yield
            return
        if self._profile is None:
            self._profile = self._start()
        with record_function(f"step {step}"):
            yield
        if step == self._last:
            self._write()

    def _start(self) -> profile:
        on_gpu = [ProfilerActivity.CUDA] if self.run.pipe.device.type == "cuda" else []
        # else the profiler sees this thread only, and not the one that makes the next batch
        every_thread = ExperimentalConfig(profile_all_threads=True)
        # acc_events: without it torch 2.11 warns of a second cycle at the start of the first
        started = profile(
            activities=[ProfilerActivity.CPU, *on_gpu], experimental_config=every_thread, acc_events=True
        )
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
            self.run.display.say(f"profile of steps {self._first} to {self._last}: {self._path.parent}")
