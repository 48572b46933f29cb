"""Plan a run whose mesh and microbatches are fixed: choose its schedule, split and recomputation.

    for each schedule:  nothing recomputed                          where that fits
                        else selective, then full recomputation     in the fewest microbatches in flight

Of the runs that fit, the fastest is taken. The result depends on the arguments alone: all ranks of
a run get the same plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from penstock.errors import ConfigError, PartitionError, ScheduleError
from penstock.planner.candidate import Candidate, Recomputed
from penstock.planner.estimate import Estimate, estimate, proven
from penstock.planner.hardware import Cluster
from penstock.planner.space import runs
from penstock.planner.workload import Workload

_LESS: tuple[Recomputed, ...] = ("selective", "full")  # what to recompute where all does not fit


def plan_mesh(
    model: Workload,
    mesh: Candidate,
    cluster: Cluster,
    limit: float,
    accepts: Callable[[Candidate], bool] = lambda run: True,
) -> Estimate:
    """The fastest run on a mesh.

    Args:
        mesh: its ranks, axes, rows, length, microbatches and options of the mesh are kept
        limit: bytes of a device
        accepts: whether the run may have this schedule

    Raises ConfigError where the axes do not suit the model, or nothing fits.
    """
    if refusal := model.takes(mesh):
        raise ConfigError(mesh.mesh, refusal, "Take other axes")
    fitting, least = list[Estimate](), None
    for run, _ in runs(mesh, model.layers):
        if not accepts(run):
            continue
        for form in _forms(model, run, cluster, limit):
            if form.nbytes <= limit:
                fitting.append(form)
            elif least is None or form.nbytes < least.nbytes:
                least = form
    if fitting:
        return min(fitting, key=lambda form: form.seconds)
    raise _nothing(mesh, least, limit)


def _forms(model: Workload, run: Candidate, cluster: Cluster, limit: float) -> Iterator[Estimate]:
    """The run with nothing recomputed; where that does not fit, with the fewest microbatches recomputed."""
    try:
        kept = estimate(model, run, cluster)
        yield kept
        if kept.nbytes > limit:
            for what in _LESS:
                yield _fewest(model, replace(run, recomputed=what), cluster, limit, kept.candidate.split)
    except (ConfigError, PartitionError, ScheduleError):  # no such schedule for these numbers
        return


def _fewest(
    model: Workload, run: Candidate, cluster: Cluster, limit: float, split: tuple[int, ...]
) -> Estimate:
    """The run with as few microbatches in flight recomputed as fit; with all of them where none do.

    split: of the run without recomputation, which is kept where it fits
    """
    everything = estimate(model, replace(run, split=split), cluster)
    if everything.nbytes > limit:
        return estimate(model, run, cluster)  # in a split of its own
    peaks = proven(run).peak_live
    low, high, best = [0] * run.ranks, list(peaks), everything
    while low != high:  # of all ranks at once: to recompute more never holds more
        middle = [(few + many) // 2 for few, many in zip(low, high, strict=True)]
        form = estimate(model, replace(everything.candidate, in_flight=tuple(middle)), cluster)
        if form.nbytes <= limit:
            best = form
        for rank, memory in enumerate(form.memory):
            if low[rank] < high[rank]:
                fits = memory.total <= limit
                low[rank], high[rank] = (low[rank], middle[rank]) if fits else (middle[rank] + 1, high[rank])
    last = estimate(model, replace(everything.candidate, in_flight=tuple(low)), cluster)
    return last if last.nbytes <= limit else best  # how long a message is held depends on other ranks


def _nothing(mesh: Candidate, least: Estimate | None, limit: float) -> ConfigError:
    value = f"a plan for {mesh.mesh} with {mesh.microbatches} microbatches of {mesh.rows} rows"
    if least is None:
        return ConfigError(value, "no schedule exists for these numbers", "Give fewer ranks")
    rule = f"the smallest, {least.candidate.label}, needs {least.nbytes / 2**20:,.0f} MiB on a device, and "
    rule += f"{limit / 2**20:,.0f} MiB are there"
    return ConfigError(value, rule, "Take more ranks, a larger dp_shard, or more and smaller microbatches")
