"""Find the fastest runs of a model on a cluster, with a bound on what the search may have missed.

1. Each schedule of a mesh gets a lower bound, for any split and anything recomputed (bound.py).
2. Runs are drafted in the order of the times that they promise, which estimate bubble and recomputation. A
   draft simulates a few microbatches a rank, and lengthens the step evenly. A promise knows no communication
   but that of gradients, so the promises of a mesh are multiplied by the least ratio of a draft's time to its
   promise there. Once half of `most` is used, the order is that of the bounds.
3. A run is left out where its bound is above the tenth best so far, or where its memory never fits.
4. The best are simulated whole, with the memory of their messages.

No run of these meshes and schedules, in whatever split, takes less than the least bound. No run that was not
drafted takes less than the least of theirs: most often that is above the tenth best.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import nsmallest
from typing import NamedTuple

from penstock.errors import ConfigError, PartitionError, ScheduleError
from penstock.planner.bound import Loads, part_weights
from penstock.planner.candidate import Candidate
from penstock.planner.estimate import Estimate, HostRoom, Trial
from penstock.planner.forms import AGAIN, Miss, fastest_form, tightened
from penstock.planner.hardware import Cluster
from penstock.planner.short import Draft, lengthened, shortened
from penstock.planner.space import ScheduleKind, meshes, runs
from penstock.planner.workers import forked
from penstock.planner.workload import Workload
from penstock.reading import gib
from penstock.schedule.collector import collector_paused

RESERVED = 0.06  # of a device's memory: the framework's context, NCCL's buffers, fragments
_SIMULATED = 40  # long runs that a search simulates; it simulates more if they are short
_LONG = 2400  # forward ops in the forms of a run that counts as one; a longer run counts as one, too
_SHORTEST = 100  # forward ops: the cost of a form besides its own ops
_FORMS = 3  # simulated of a run that recomputes or offloads
_SURELY = 0.7  # of what a schedule holds about: if that is too much, it is not tried
_COPIED = 3  # microbatches of a rank that offloads: one at work, one leaves, one comes back
_AT_ONCE = 16  # drafts between two looks at the best so far
_FORMED_AGAIN = 3  # times at most, for the memory of messages
_FEW = 12  # runs of a search for what would fit


class Promise(NamedTuple):
    """A run before it is simulated.

    likely, least: estimate and lower bound of its time, in seconds
    size: the cost of its simulation; 1 is that of a long run
    """

    likely: float
    least: float
    candidate: Candidate
    size: float

    @property
    def mesh(self) -> Hashable:
        return self.candidate.ranks, self.candidate.axes


_Form = Draft | Estimate | Miss | None  # None where there is no such schedule
_Job = tuple[Callable[[Workload, Candidate, Cluster, float], _Form], Candidate]


@dataclass(frozen=True)
class Plans:
    """What a search has seen.

    best: the fastest runs that fit, the fastest first
    fitting: drafts of all runs that fit, in that order
    least: seconds that no run of these meshes takes less than, in whatever split
    left: seconds that none of the runs takes less than that were not drafted
    runs: how many there are
    limit: bytes of a device
    """

    best: tuple[Estimate, ...]
    fitting: tuple[Draft, ...] = field(repr=False)
    least: float
    left: float
    runs: int
    limit: float

    @property
    def gap(self) -> float:
        """The share of the best run's time by which any of the runs might be faster in another split."""
        return max(0.0, 1 - self.least / self.best[0].seconds)

    @property
    def gap_of_field(self) -> float:
        """The share of the best run's time by which a run that was not drafted might be faster."""
        return max(0.0, 1 - self.left / self.best[0].seconds)


def plan(
    model: Workload,
    cluster: Cluster,
    batch: int,
    length: int,
    *,
    limit: float | None = None,
    keep: int = 10,
    most: float = _SIMULATED,
    processes: int = 1,
) -> Plans:
    """Search for the fastest runs.

    Args:
        batch: rows of a step; length: tokens of a row
        limit: bytes of a device; None takes its memory but for `RESERVED`
        keep: the number of runs to return
        most: about the number of long runs to simulate; a short one counts as a part of one (`Promise.size`)
        processes: the number that work at the same time; the result is the same for any number

    Raises ConfigError where no mesh takes such a batch, or nothing fits.
    """
    nbytes = memory_limit(cluster, limit)
    field = list(meshes(model, cluster, batch, length))
    taken = [mesh for mesh in field if not model.takes(mesh)]
    if not taken:
        raise _no_mesh(model, cluster, batch, field)
    roomy = [mesh for mesh in taken if fixed_bytes(model, mesh) <= nbytes]
    if not roomy:
        raise _too_large(model, cluster, nbytes, min(fixed_bytes(model, mesh) for mesh in taken))
    model.measure(
        (replace(mesh, chunked_loss=chunks) for mesh in roomy for chunks in (True, False)), processes
    )
    promises = sorted(promised(model, cluster, roomy, nbytes), key=lambda promise: promise[:2])
    if not promises:
        raise _no_activations(model, cluster, batch, length, nbytes)
    with forked(partial(_formed, model, cluster, nbytes), processes) as forms:
        fitting, missed, left = _simulated(forms, promises, keep, most)
        if not fitting:
            raise _nothing_fits(model, cluster, batch, length, nbytes, missed)
        ordered = sorted(fitting, key=lambda run: run.seconds)
        finals = forms([(_exact, run.candidate) for run in ordered[:keep]])
    best = sorted((run for run in finals if isinstance(run, Estimate)), key=lambda run: run.seconds)
    if not best:  # their messages are too much
        best = [Trial.of(model, ordered[0].candidate, cluster, buffers=False).estimate()]
    least = min(promise.least for promise in promises)
    return Plans(tuple(best), tuple(ordered), least, left, len(promises), nbytes)


def fixed_bytes(model: Workload, mesh: Candidate) -> float:
    """The least that the fullest rank of a mesh holds of weights, gradients and the optimizer's states.

    Weights that FSDP gathers may be freed layer by layer; the sums of gradients are whole.
    """
    first, kinds, last = part_weights(model, mesh)
    parts = (first, *(kinds[kind] for kind in model.kinds), last)
    return sum(part._replace(gathered_weights=0).fixed for part in parts) / mesh.ranks


def _exact(model: Workload, candidate: Candidate, cluster: Cluster, limit: float) -> Estimate | Miss:
    """A run with the memory of its messages; more is recomputed where that is too much."""
    some = Trial.of(model, candidate, cluster, buffers=False)
    messages = _messages(model, candidate, cluster)
    for _ in range(_FORMED_AGAIN):
        if not all(some.fits(limit - messages, some.again)):
            form = tightened(model, some, cluster, limit - messages)
            if isinstance(form, Miss):
                return form
            some = form
        run = Trial.of(model, some.candidate, cluster).estimate()
        if run.nbytes <= limit:
            return run
        messages += run.nbytes - limit
    return Miss(run.nbytes, run.candidate)


def _messages(model: Workload, candidate: Candidate, cluster: Cluster) -> float:
    """About the bytes of messages on the fullest rank, from a short run."""
    short = shortened(candidate) or candidate
    alone, run = (Trial.of(model, short, cluster, buffers=buffers).estimate() for buffers in (False, True))
    return run.nbytes - alone.nbytes


def memory_limit(cluster: Cluster, limit: float | None) -> float:
    """Bytes that a run may take of a device. Raises ConfigError for more than it has."""
    if limit is not None and not 0 < limit <= cluster.device.memory:
        rule = f"{cluster.device.name} has {gib(cluster.device.memory)} GiB"
        raise ConfigError(f"memory={gib(limit)} GiB", rule, "Give at most that, or leave it out")
    return cluster.device.memory * (1 - RESERVED) if limit is None else limit


def _formed(model: Workload, cluster: Cluster, limit: float, job: _Job) -> _Form:
    """A job in any process."""
    form, candidate = job
    try:
        with collector_paused():  # a schedule has a hundred thousand ops, none of them in a cycle
            return form(model, candidate, cluster, limit)
    except (ConfigError, PartitionError, ScheduleError):  # no such schedule for these numbers
        return None


def _simulated(
    forms: Callable[[Sequence[_Job]], list[_Form]], promises: Sequence[Promise], keep: int, most: float
) -> tuple[list[Draft], Miss | None, float]:
    """The runs that fit; of the others the one that misses least; and the least bound of the rest."""
    fitting: list[Draft] = []
    missed: Miss | None = None
    left, waiting, used = math.inf, list(promises), 0.0
    slower = dict[Hashable, float]()  # by mesh: the least ratio of a draft's time to its promise
    while waiting:
        times = nsmallest(keep, (run.seconds for run in fitting))
        slowest = times[-1] if len(times) == keep else math.inf
        waiting.sort(key=_by_bound if 2 * used >= most else partial(_by_promise, slower))
        some, waiting = waiting[:_AT_ONCE], waiting[_AT_ONCE:]
        chosen = [promise for promise in some if promise.least < slowest and used < most]
        left = min([left, *(promise.least for promise in some if promise not in chosen)])
        runs = forms([(drafted, promise.candidate) for promise in chosen])
        for promise, run in zip(chosen, runs, strict=True):
            if isinstance(run, Draft):
                fitting.append(run)
                used += min(1.0, promise.size * (_FORMS if run.candidate.saves else 1))
                slower[promise.mesh] = min(slower.get(promise.mesh, math.inf), run.seconds / promise.likely)
            elif isinstance(run, Miss) and (missed is None or run.nbytes < missed.nbytes):
                missed = run
    return fitting, missed, left


def _by_bound(promise: Promise) -> float:
    return promise.least


def _by_promise(slower: Mapping[Hashable, float], promise: Promise) -> float:
    return promise.likely * slower.get(promise.mesh, 1.0)


def _size(run: Candidate, kind: ScheduleKind) -> float:
    short = shortened(run) or run
    return (_SHORTEST + run.ranks * kind.stages * short.microbatches) / _LONG


def promised(
    model: Workload, cluster: Cluster, field: Iterable[Candidate], limit: float
) -> Iterator[Promise]:
    """The runs of these meshes, with their bounds, but for those that hold about more than `limit`."""
    room = HostRoom.of(cluster)
    for mesh in field:
        loads = [Loads.of(model, replace(mesh, recomputed=what), cluster) for what in AGAIN]
        for run, kind in runs(mesh, model.layers):
            host = None if kind.splits else room
            likely = _likely(loads[0], kind, run, limit, host)
            least = min(one.least(kind, run.ranks, run.microbatches, limit, host) for one in loads)
            if max(likely, least) < math.inf:
                yield Promise(max(likely, least), least, run, _size(run, kind))


def _likely(full: Loads, kind: ScheduleKind, run: Candidate, limit: float, host: HostRoom | None) -> float:
    """About the seconds of a run; inf where it holds about too much.

    full: with full recomputation; host: where activations may wait
    """
    whole, rounds = full.total, run.microbatches / run.ranks
    room, live = limit - whole.fixed / run.ranks, min(kind.live, rounds)
    at_once = live if host is None else min(live, _COPIED / run.ranks)
    if _SURELY * at_once * whole.recomputed > room:
        return math.inf
    busy = whole.seconds * rounds
    again = full.again * rounds * max(0.0, whole.kept - room / live)
    if host is not None:  # copies run beside ops
        copies = rounds * max(0.0, whole.kept - room / live) / host.rate
        kept = full.again * rounds * max(0.0, whole.kept - (room + host.nbytes) / live)
        again = min(again, max(kept, copies - busy))
    return busy + whole.end / run.ranks + again + busy * kind.bubble * (run.ranks - 1) / run.microbatches


def drafted(model: Workload, candidate: Candidate, cluster: Cluster, limit: float) -> Draft | Miss:
    """The fastest form of a run, from a short one where it is long."""
    short = shortened(candidate)
    run = fastest_form(model, short or candidate, cluster, limit)
    microbatches = candidate.microbatches
    if isinstance(run, Miss):
        return run._replace(candidate=replace(run.candidate, microbatches=microbatches))
    if short is None:
        return Draft(run.candidate, run.seconds, run.nbytes)
    return lengthened(model, run, cluster, microbatches)


# ---- errors


def _no_mesh(model: Workload, cluster: Cluster, batch: int, field: Sequence[Candidate]) -> ConfigError:
    devices = f"{cluster.world} devices"
    remedy = f"Give a multiple of {cluster.world} rows, or take another number of devices"
    if field:
        rule = f"no mesh of {devices} that divides it takes the model: {model.takes(field[0])}"
    else:
        rule = f"no mesh of {devices} divides it into rows for each pipeline"
    return ConfigError(f"batch={batch}", rule, remedy)


def _value(model: Workload, cluster: Cluster) -> str:
    name = type(model.source.model).__name__
    return f"{name} with {model.parameters:,} parameters on {cluster.world} devices"


def _too_large(model: Workload, cluster: Cluster, limit: float, least: float) -> ConfigError:
    """Weights alone do not fit. least: bytes of a device, in the mesh that spreads them best"""
    rule = (
        f"weights, gradients and the optimizer's states alone take {gib(least)} GiB a device in the mesh "
        f"that spreads them best, {gib(least - limit)} GiB more than {gib(limit)} GiB"
    )
    hosts = 2 ** math.ceil(math.log2(cluster.hosts * least / limit))
    return ConfigError(_value(model, cluster), rule, f"Take {hosts} hosts or more, or a smaller model")


def _no_activations(model: Workload, cluster: Cluster, batch: int, length: int, limit: float) -> ConfigError:
    rule = f"with all layers recomputed, activations leave every plan above {gib(limit)} GiB a device"
    return ConfigError(_value(model, cluster), rule, _smallest_change(model, cluster, batch, length, limit))


def _nothing_fits(
    model: Workload, cluster: Cluster, batch: int, length: int, limit: float, missed: Miss | None
) -> ConfigError:
    if missed is None:
        rule = f"no schedule exists for a batch of {batch} on these meshes"
        return ConfigError(_value(model, cluster), rule, "Give a larger batch")
    whole = replace(missed.candidate, recomputed="full", in_flight=None, split=())
    run = Trial.of(model, whole, cluster).estimate()
    rank = run.memory[run.fullest]
    rule = (
        f"of the plans tried the smallest, {whole.mesh} with {whole.rows} rows a microbatch, recomputed "
        f"{whole.recomputation}, needs {gib(run.nbytes)} GiB a device, {gib(run.nbytes - limit)} GiB more "
        f"than {gib(limit)} GiB: {gib(rank.fixed)} GiB for weights, gradients and the optimizer, and "
        f"{gib(rank.activations or 0)} GiB for activations"
    )
    return ConfigError(_value(model, cluster), rule, _smallest_change(model, cluster, batch, length, limit))


def _smallest_change(model: Workload, cluster: Cluster, batch: int, length: int, limit: float) -> str:
    """The first change that fits: more hosts, or else shorter rows."""
    changes = [
        (
            f"{cluster.hosts * times} hosts",
            cluster.model_copy(update={"hosts": cluster.hosts * times}),
            length,
        )
        for times in (2, 4, 8)
        if cluster.between is not None
    ]
    changes += [(f"rows of {length // times} tokens", cluster, length // times) for times in (2, 8)]
    for words, larger, shorter in changes:
        field = [mesh for mesh in meshes(model, larger, batch, shorter) if mesh.rows == 1]
        roomy = (mesh for mesh in field if not model.takes(mesh) and fixed_bytes(model, mesh) <= limit)
        few = sorted(promised(model, larger, roomy, limit), key=lambda promise: -promise.candidate.axes.tp)[
            :_FEW
        ]
        with forked(partial(_formed, model, larger, limit), 1) as forms:
            if _simulated(forms, few, 1, _FEW)[0]:
                return f"Take {words}, which fit"
    return "Take more hosts, a smaller model, or shorter rows"
