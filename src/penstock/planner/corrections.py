"""Correct the constants of a cluster by runs that were measured.

    compute   seconds of F, B, I and W, measured over predicted: the median over the runs. The device's shares
              of its peaks and of its bandwidth, and its launch, change by this one factor
    links     where runs wait for messages and collectives for some of their step: the factor of latencies and
              of bytes with which these runs take, on average, as long as measured

A share is at most 1: a device that is faster than its peak gets a higher peak.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from penstock.planner.estimate import Estimate, estimate
from penstock.planner.hardware import Cluster, Device, Link
from penstock.planner.workload import Workload

_WAITS = 0.05  # of a step: with less the runs do not tell links from compute
_MOST = 16.0  # times as slow, or as fast, as the links may be
_HALVINGS = 12


@dataclass(frozen=True)
class MeasuredRun:
    """A run, predicted and measured.

    steps: seconds of the steps that count; empty where the run failed
    computing: the share of a step in which a rank runs ops, as a mean over ranks
    kept, predicted_kept: bytes of the fullest rank, of the same kind; `what_is_kept` says which
    error: why the run failed
    """

    estimate: Estimate
    steps: tuple[float, ...] = ()
    computing: float = 0.0
    kept: int = 0
    predicted_kept: float = 0.0
    error: str = ""

    @property
    def seconds(self) -> float:
        """Of a step: the median."""
        return median(self.steps)

    @property
    def slowdown(self) -> float:
        """Seconds of ops, measured over predicted."""
        timeline = self.estimate.timeline
        predicted = sum(span.end - span.start for span in timeline.spans) / timeline.ranks
        return self.computing * self.seconds / predicted


class Correction(NamedTuple):
    """Seconds measured over seconds predicted: of ops, and of links. links: None where runs do not tell"""

    compute: float
    links: float | None = None


def correction(model: Workload, cluster: Cluster, runs: Sequence[MeasuredRun]) -> Correction:
    """The factors by which `cluster` mispredicts these runs, none of which failed."""
    compute = median(run.slowdown for run in runs)
    return Correction(compute, _links(model, corrected(cluster, Correction(compute)), runs))


def corrected(cluster: Cluster, factors: Correction) -> Cluster:
    """The cluster with its constants corrected."""
    changes: dict[str, object] = {"device": _slower(cluster.device, factors.compute)}
    if factors.links is not None:
        links = {"inside": cluster.inside, "between": cluster.between}
        changes |= {name: _longer(link, factors.links) for name, link in links.items() if link is not None}
    return cluster.model_copy(update=changes)


def _slower(device: Device, times: float) -> Device:
    shares = device.efficiencies
    matmul, attention, memory = (share / times for share in (shares.matmul, shares.attention, shares.memory))
    over_peak, over_bandwidth = max(1.0, matmul, attention), max(1.0, memory)
    reached = {
        "matmul": matmul / over_peak,
        "attention": attention / over_peak,
        "memory": memory / over_bandwidth,
    }
    changes = {
        "peaks": {dtype: peak * over_peak for dtype, peak in device.peaks.items()},
        "bandwidth": device.bandwidth * over_bandwidth,
        "launch": min(1.0, device.launch * times),
        "efficiencies": shares.model_copy(update=reached),
    }
    return device.model_copy(update=changes)


def _longer(link: Link, times: float) -> Link:
    changes = {"latency": min(1.0, link.latency * times), "bandwidth": link.bandwidth / times}
    return link.model_copy(update=changes)


def _links(model: Workload, cluster: Cluster, runs: Sequence[MeasuredRun]) -> float | None:
    """The factor of the links, where runs wait for them. cluster: with its compute corrected"""

    def predicted(run: MeasuredRun, factor: float) -> Estimate:
        return estimate(model, run.estimate.candidate, corrected(cluster, Correction(1.0, factor)))

    def waits(run: MeasuredRun) -> bool:
        usual = predicted(run, 1.0)
        waited = sum(time for axis, time in usual.exposed.items() if axis != "host")
        return waited >= _WAITS * usual.seconds

    waiting = [run for run in runs if waits(run)]
    if not waiting:
        return None

    def too_long(factor: float) -> bool:
        """Whether these runs are predicted to take longer than they do."""
        return sum(math.log(predicted(run, factor).seconds / run.seconds) for run in waiting) > 0

    low, high = -math.log2(_MOST), math.log2(_MOST)
    if too_long(2**low) or not too_long(2**high):  # no links explain these times
        return None
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if too_long(2**middle) else (middle, high)
    return float(2 ** ((low + high) / 2))
