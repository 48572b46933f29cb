"""Plan a run whose mesh and microbatches are fixed: choose its schedule, split and recomputation.

    for each schedule:  nothing recomputed                          where that fits
                        else selective, then full recomputation     in the fewest microbatches in flight

Of the runs that fit, the fastest is taken. The result depends on the arguments alone: all ranks of
a run get the same plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from penstock.errors import ConfigError, PartitionError, ScheduleError
from penstock.planner.candidate import Candidate
from penstock.planner.estimate import Estimate, Trial
from penstock.planner.forms import Miss, fastest_form, least_recomputed
from penstock.planner.hardware import Cluster
from penstock.planner.space import runs
from penstock.planner.workload import Workload


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
    forms = [_form(model, run, cluster, limit) for run, _ in runs(mesh, model.layers) if accepts(run)]
    if fitting := [form for form in forms if isinstance(form, Estimate)]:
        return min(fitting, key=lambda form: form.seconds)
    least = min((form for form in forms if isinstance(form, Miss)), default=None)
    raise _nothing(model, mesh, least, cluster, limit)


def _form(model: Workload, run: Candidate, cluster: Cluster, limit: float) -> Estimate | Miss | None:
    """The fastest form that fits, messages included; None where there is no such schedule."""
    try:
        return least_recomputed(model, Trial.of(model, run, cluster), cluster, limit)
    except (ConfigError, PartitionError, ScheduleError):
        return None


def _nothing(
    model: Workload, mesh: Candidate, least: Miss | None, cluster: Cluster, limit: float
) -> ConfigError:
    value = f"a plan for {mesh.mesh} with {mesh.microbatches} microbatches of {mesh.rows} rows"
    if least is None:
        return ConfigError(value, "no schedule exists for these numbers", "Give fewer ranks")
    needed = f"needs at least {least.nbytes / 2**20:,.0f} MiB on a device"
    rule = f"the smallest, {least.candidate.label}, {needed}, and {limit / 2**20:,.0f} MiB are there"
    return ConfigError(value, rule, _remedy(model, least.candidate, cluster, limit))


def _remedy(model: Workload, run: Candidate, cluster: Cluster, limit: float) -> str:
    """The cheapest change that fits: what the planner does not choose here, or else another mesh."""
    fresh = replace(run, recomputed="none", in_flight=None, chunked_loss=True, split=())
    chunks = "" if run.chunked_loss else "train.chunked_loss: true"
    if chunks and isinstance(_form(model, fresh, cluster, limit), Estimate):
        return f"Set {chunks}"
    form = fastest_form(model, fresh, cluster, limit)
    if isinstance(form, Estimate) and (ahead := form.candidate.offload_ahead):
        chunks = chunks and f"{chunks}, "
        return f"Set {chunks}train.activation_offloading: {{ahead: {ahead}}}, and the schedule {run.label}"
    return "Take more ranks, a larger dp_shard, or more and smaller microbatches"
