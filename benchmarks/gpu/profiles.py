"""What torch.profiler has seen of a step: a Chrome trace, and counts from it."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.gpu.models import wait_for

WINDOW = "the measured step"
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of what a GPU does
# calls of CUDA's runtime in which the host waits for the GPU
SYNCHRONISE = frozenset({
    "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy",
    "cuStreamSynchronize", "cuCtxSynchronize", "cuEventSynchronize",
})  # fmt: skip
_OP = re.compile(r"\b\d+[FBIW]\d+\b")


@dataclass(frozen=True)
class Profile:
    """The events of a Chrome trace. Times in microseconds."""

    events: list[Mapping[str, Any]]

    @property
    def synchronisations(self) -> int:
        """Waits of the host for the GPU within the step."""
        start, end = self._window
        calls = (event for event in self.events if event["name"] in SYNCHRONISE)
        return sum(start <= float(event["ts"]) <= end for event in calls)

    @property
    def busy(self) -> float:
        """Seconds in which the GPU did anything; what runs side by side counts once."""
        spans = sorted(_span(event) for event in self.events if event.get("cat") in ON_GPU)
        total, until = 0.0, float("-inf")
        for start, end in spans:
            total += max(0.0, end - max(start, until))
            until = max(until, end)
        return total / 1e6

    @property
    def ops(self) -> set[str]:
        """The texts of ops that stand in names of ranges."""
        names = {str(event["name"]) for event in self.events if event.get("cat") in _RANGES}
        return {text for name in names for text in _OP.findall(name)}

    @property
    def _window(self) -> tuple[float, float]:
        return next(_span(event) for event in self._ranges if event["name"] == WINDOW)

    @property
    def _ranges(self) -> Iterator[Mapping[str, Any]]:
        return (event for event in self.events if event.get("cat") in _RANGES)


_RANGES = ("user_annotation", "cpu_op", "gpu_user_annotation")  # older versions of torch call a range an op


def _span(event: Mapping[str, Any]) -> tuple[float, float]:
    start = float(event["ts"])
    return start, start + float(event["dur"])


def profiled(device: torch.device, run: Callable[[], object], file: Path, *, host: bool = True) -> Profile:
    """Run under torch.profiler, and write a Chrome trace.

    Args:
        file: its name ends in .json.gz
        host: whether to record the host's calls too. Without them the host is faster, and the profile has
            neither ranges nor a number of synchronisations.
    """
    activities = [ProfilerActivity.CPU] if host else []
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    wait_for(device)
    with profile(activities=activities) as seen:
        with record_function(WINDOW):
            run()
        wait_for(device)  # after the step's end, and so not among its synchronisations
    seen.export_chrome_trace(str(file))
    with gzip.open(file, "rt", encoding="utf-8") as opened:
        content = json.load(opened)
    return Profile([event for event in content["traceEvents"] if event.get("ph") == "X"])
