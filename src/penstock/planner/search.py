"""Find the fastest runs of a model on a cluster, with a bound on what the search may have missed.

1. Each mesh gets a lower bound: its ops, collectives and reductions spread evenly over the pipeline's ranks,
   with no bubble, and the optimizer.
2. Runs are simulated in the order of what they promise: the bound, and about the bubble of their schedule.
3. A run is left out where its bound is above the tenth best so far, or where its memory never fits.

No run of these meshes, by whatever schedule and split, takes less than the least bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from heapq import nsmallest
from typing import NamedTuple

from penstock.errors import ConfigError, PartitionError, ScheduleError
from penstock.planner.candidate import Candidate, Recomputed
from penstock.planner.communication import groups
from penstock.planner.estimate import Estimate, Trial, optimizer_seconds, reduction_seconds
from penstock.planner.hardware import Cluster
from penstock.planner.space import meshes, runs
from penstock.planner.stages import Parts
from penstock.planner.workload import Workload
from penstock.schedule.simulation.recompute import counts_within

RESERVED = 0.06  # of a device's memory: the framework's context, NCCL's buffers, fragments
_SIMULATED = 100  # runs of a search
_AGAIN: tuple[Recomputed, ...] = ("selective", "full")


class Promise(NamedTuple):
    """A run before it is simulated. least: seconds that it takes at least; likely: about"""

    likely: float
    least: float
    candidate: Candidate


@dataclass(frozen=True)
class Plans:
    """What a search has seen.

    best: the fastest runs that fit, the fastest first
    fitting: all simulated runs that fit, in that order
    least: seconds that no run of these meshes takes less than
    simulated, runs: how many were simulated, of how many
    limit: bytes of a device
    """

    best: tuple[Estimate, ...]
    fitting: tuple[Estimate, ...] = field(repr=False)
    least: float
    simulated: int
    runs: int
    limit: float

    @property
    def gap(self) -> float:
        """The share of the best run's time by which another run might be faster."""
        return max(0.0, 1 - self.least / self.best[0].seconds)


def plan(
    model: Workload,
    cluster: Cluster,
    batch: int,
    length: int,
    *,
    limit: float | None = None,
    keep: int = 10,
    most: int = _SIMULATED,
) -> Plans:
    """Search for the fastest runs.

    Args:
        batch: rows of a step; length: tokens of a row
        limit: bytes of a device; None takes its memory but for `RESERVED`
        keep: how many runs to return; most: how many to simulate

    Raises ConfigError where no mesh takes such a batch, or nothing fits.
    """
    nbytes = memory_limit(cluster, limit)
    promises = sorted(promised(model, cluster, batch, length), key=lambda promise: promise[:2])
    if not promises:
        raise _no_mesh(model, cluster, batch, length)
    fitting, missed, simulated = _simulated(model, cluster, promises, nbytes, keep, most)
    if not fitting:
        raise _nothing_fits(model, cluster, batch, length, nbytes, missed)
    ordered = sorted(fitting, key=lambda run: run.seconds)
    best = sorted(
        (Trial.of(model, run.candidate, cluster).estimate() for run in ordered[:keep]),
        key=lambda run: run.seconds,
    )
    least = min(promise.least for promise in promises)
    return Plans(tuple(best), tuple(ordered), least, simulated, len(promises), nbytes)


def memory_limit(cluster: Cluster, limit: float | None) -> float:
    """Bytes that a run may take of a device. Raises ConfigError for more than it has."""
    if limit is not None and not 0 < limit <= cluster.device.memory:
        rule = f"{cluster.device.name} has {gib(cluster.device.memory)}"
        raise ConfigError(f"memory={gib(limit)}", rule, "Give at most that, or leave it out")
    return cluster.device.memory * (1 - RESERVED) if limit is None else limit


def _simulated(
    model: Workload, cluster: Cluster, promises: list[Promise], limit: float, keep: int, most: int
) -> tuple[list[Estimate], Estimate | None, int]:
    """The runs that fit; of the others the one that misses least; and how many were simulated."""
    fitting: list[Estimate] = []
    missed: Estimate | None = None
    simulated = 0
    for promise in promises:
        times = nsmallest(keep, (run.seconds for run in fitting))
        if simulated >= most:
            break
        if len(times) == keep and promise.least >= times[-1]:
            continue
        try:
            run = fitted(model, promise.candidate, cluster, limit)
        except (ConfigError, PartitionError, ScheduleError):  # no such schedule for these numbers
            continue
        simulated += 1
        if run.nbytes <= limit:
            fitting.append(run)
        elif missed is None or run.nbytes < missed.nbytes:
            missed = run
    return fitting, missed, simulated


def promised(model: Workload, cluster: Cluster, batch: int, length: int) -> Iterator[Promise]:
    """Every run of the field that the model's axes take, with its bounds."""
    for mesh in meshes(model, cluster, batch, length):
        if model.takes(mesh):
            continue
        ranks, across = mesh.ranks, groups(mesh.ranks, mesh.axes, cluster)
        parts = Parts.of(model.work(mesh), model.traffic(mesh), across, cluster)
        memory = model.memory(mesh)
        weights = [memory.embedding, *(memory.kinds[kind] for kind in memory.layers), memory.head]
        busy = parts.whole(recomputed=False) * mesh.microbatches / ranks
        whole = reduction_seconds(weights, across, cluster) + optimizer_seconds(weights, cluster.device)
        for run, bubble in runs(mesh, model.layers):
            idle = busy * bubble * (ranks - 1) / mesh.microbatches
            yield Promise(busy + whole / ranks + idle, busy + whole / ranks, run)


def fitted(model: Workload, candidate: Candidate, cluster: Cluster, limit: float) -> Estimate:
    """The fastest form of a run that fits into `limit`; if none does, the one that holds least.

    Layers run again in as few microbatches as the memory asks for. Weights are gathered layer by layer where
    gathered whole they do not fit.
    """
    trial = Trial.of(model, candidate, cluster, buffers=False)
    if candidate.sharded and max(rank.total for rank in trial.fixed) > limit:
        trial = Trial.of(model, replace(candidate, reshard=True), cluster, buffers=False)
    kept = trial.estimate()
    if kept.nbytes <= limit:
        return kept
    forms = [_recomputed(model, trial, cluster, limit, what) for what in _AGAIN]
    return min(
        forms, key=lambda run: (run.nbytes > limit, run.seconds if run.nbytes <= limit else run.nbytes)
    )


def _recomputed(model: Workload, kept: Trial, cluster: Cluster, limit: float, what: Recomputed) -> Estimate:
    """With the fewest microbatches recomputed that fit, or else all, in layers split for that."""
    everything = replace(kept.candidate, recomputed=what, in_flight=None, split=())
    whole = Trial.of(model, everything, cluster, buffers=False)
    again = whole.estimate()
    if again.nbytes > limit:
        return again
    some = Trial.of(model, replace(everything, split=kept.candidate.split), cluster, buffers=False)
    limits = [limit - rank.fixed for rank in some.fixed]
    try:
        counts = counts_within(some.proof.schedule, some.kept, some.recomputed, limits)
    except ConfigError:  # this split does not fit
        return again
    fewer = replace(some, candidate=replace(some.candidate, in_flight=counts)).estimate()
    return min(again, fewer, key=lambda run: run.seconds)


# ---- errors


def _no_mesh(model: Workload, cluster: Cluster, batch: int, length: int) -> ConfigError:
    refused = {why for mesh in meshes(model, cluster, batch, length) if (why := model.takes(mesh))}
    rule = f"no mesh of {cluster.world} devices divides it into rows for each pipeline"
    if refused:
        rule = f"no mesh of {cluster.world} devices takes the model: {min(refused)}"
    least = cluster.world // max(size for size in range(1, cluster.world + 1) if cluster.world % size == 0)
    remedy = f"Give a multiple of {least} rows that has factors of {cluster.world}, as {cluster.world}"
    return ConfigError(f"batch={batch}", rule, remedy)


def _nothing_fits(
    model: Workload, cluster: Cluster, batch: int, length: int, limit: float, missed: Estimate | None
) -> ConfigError:
    value = (
        f"{type(model.source.model).__name__} with {model.parameters:,} parameters on {cluster.world} devices"
    )
    if missed is None:
        rule = f"no schedule exists for a batch of {batch} on these meshes"
        return ConfigError(value, rule, "Give a larger batch")
    rank = missed.memory[missed.fullest]
    over = missed.nbytes - limit
    rule = (
        f"the smallest plan, {missed.candidate.mesh} with {missed.candidate.recomputed} recomputation, needs "
        f"{gib(missed.nbytes)} a device, {gib(over)} more than {gib(limit)}: {gib(rank.fixed)} for weights, "
        f"gradients and optimizer, {gib(rank.activations or 0)} for activations"
    )
    return ConfigError(value, rule, _smallest_change(model, cluster, batch, length))


def _smallest_change(model: Workload, cluster: Cluster, batch: int, length: int) -> str:
    """The first change that fits: more hosts, or else shorter rows."""
    changes: list[tuple[str, Cluster, int]] = []
    for times in (2, 4, 8, 16, 32):
        more = cluster.hosts * times
        if cluster.between is not None:
            changes.append((f"{more} hosts", cluster.model_copy(update={"hosts": more}), length))
        if length // times >= 128:
            changes.append((f"rows of {length // times} tokens", cluster, length // times))
    for words, larger, shorter in changes:
        promises = sorted(promised(model, larger, batch, shorter), key=lambda promise: promise[:2])
        few = sorted(promises, key=lambda promise: -promise.candidate.devices / promise.candidate.rows)[:6]
        runs_that_fit, _, _ = _simulated(model, larger, few, memory_limit(larger, None), 1, 6)
        if runs_that_fit:
            return f"Take {words}, which fit"
    return "Take more hosts, a smaller model, or shorter rows"


def gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:,.1f} GiB"
