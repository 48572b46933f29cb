"""The forms of a run: what recomputes, offloads and chunks of logits make fit, from the fastest on.

    nothing         all activations stay on the device, logits are whole
    chunks          large logits in chunks: the head runs once more, and the last stage holds less at work
    offloading      activations wait in host memory; free where copies take no longer than the ops beside them
    recomputation   layers run again, in as few microbatches in flight as the memory asks for
    both            activations wait in host memory, and some layers run again

A form is tried where those that save less do not fit. It is not simulated where another one is as good: each
of that one's ranks is busy, or waits for its link to the host, no longer than this one's is busy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from operator import add, le
from typing import Any, NamedTuple

from penstock.planner.candidate import Candidate, Recomputed
from penstock.planner.estimate import Estimate, HostRoom, Trial, offloads
from penstock.planner.hardware import Cluster
from penstock.planner.workload import Workload
from penstock.schedule.simulation.recompute import first_in_flight

AGAIN: tuple[Recomputed, ...] = ("full", "selective")
AHEAD = (2, 1)  # ops beside a copy: F and B, or one of them


class Miss(NamedTuple):
    """A run that does not fit, and the bytes that its fullest rank needs at least."""

    nbytes: float
    candidate: Candidate

    def __lt__(self, other: Any) -> bool:
        return bool(self.nbytes < other.nbytes)


def fastest_form(model: Workload, candidate: Candidate, cluster: Cluster, limit: float) -> Estimate | Miss:
    """The fastest form of a run that fits into `limit`, without messages.

    Weights are gathered layer by layer where gathered whole they do not fit.
    """
    return _fastest(_forms(model, candidate, cluster, limit), limit)


def least_recomputed(model: Workload, trial: Trial, cluster: Cluster, limit: float) -> Estimate | Miss:
    """The fastest form of a trial that fits: layers run again in as few microbatches as the memory asks for.

    Messages hold memory where those of `trial` do.
    """
    return _fastest(_recomputing(model, trial, cluster, limit), limit)


def tightened(model: Workload, trial: Trial, cluster: Cluster, limit: float) -> Trial | Miss:
    """A form of `trial` that recomputes as few microbatches as `limit` asks for, without a simulation.

    Layers run again as they do in `trial`, if any do there.
    """
    kept = replace(trial.candidate, recomputed="none", in_flight=None)
    fresh = Trial.of(model, kept, cluster, buffers=trial.kept.counts_buffers)
    only_full = trial.candidate.offload_ahead or trial.candidate.recomputed == "full"
    forms = list(_recomputing(model, fresh, cluster, limit, ("full",) if only_full else AGAIN))
    trials = [form for form in forms if isinstance(form, Trial)]
    if trials:
        return min(trials, key=lambda form: max(form.busy()))
    return min(form for form in forms if isinstance(form, Miss))


def _fastest(forms: Iterable[Trial | Miss], limit: float) -> Estimate | Miss:
    missed, fitting, occupied = list[Miss](), list[Estimate](), list[Sequence[float]]()
    trials = list[tuple[Sequence[float], Trial]]()
    for form in forms:
        if isinstance(form, Miss):
            missed.append(form)
        else:
            trials.append((form.busy(), form))
    for busy, trial in sorted(trials, key=lambda pair: max(pair[0])):
        if any(all(map(le, times, busy)) for times in occupied):
            continue
        run = simulated_within(trial, limit)
        if isinstance(run, Miss):
            missed.append(run)
            continue
        fitting.append(run)
        occupied.append(list(map(add, busy, run.timeline.stalled)))
    return min(fitting, key=lambda run: run.seconds) if fitting else min(missed)


def _forms(model: Workload, candidate: Candidate, cluster: Cluster, limit: float) -> Iterator[Trial | Miss]:
    whole, *in_chunks = (_trial(model, loss, cluster, limit) for loss in model.losses(candidate))
    if all(fits := whole.fits(limit)):
        yield whole
        return
    forms = list(_saving(model, whole, cluster, limit))
    yield from forms
    placement = whole.proof.schedule.placement
    last = placement.rank_of[placement.depth - 1]
    for trial in in_chunks:
        if not fits[last] and _may_help(trial, forms, last):
            yield from _saving(model, trial, cluster, limit)


def _may_help(chunks: Trial, forms: Sequence[Trial | Miss], last: int) -> bool:
    """Whether the last rank has any of these run again for longer than chunks of logits take."""
    busy = chunks.busy()[last]
    return any(isinstance(form, Miss) or form.busy()[last] > busy for form in forms)


def _saving(model: Workload, trial: Trial, cluster: Cluster, limit: float) -> Iterator[Trial | Miss]:
    """What offloads, recomputes, or both."""
    for one in _offloading(model, trial, cluster):
        forms = list(_recomputing(model, one, cluster, limit, ("full",)))  # its other results never leave
        yield from forms
        if any(isinstance(form, Trial) and form.candidate.recomputed == "none" for form in forms):
            break  # an earlier copy saves nothing
    yield from _recomputing(model, trial, cluster, limit)


def _trial(model: Workload, candidate: Candidate, cluster: Cluster, limit: float) -> Trial:
    trial = Trial.of(model, candidate, cluster, buffers=False)
    if candidate.sharded and max(rank.fixed for rank in trial.fixed) > limit:
        return Trial.of(model, replace(candidate, reshard=True), cluster, buffers=False)
    return trial


def _offloading(model: Workload, trial: Trial, cluster: Cluster) -> Iterator[Trial]:
    """The trial with its activations in host memory, where the schedule has some leave and returns them."""
    if HostRoom.of(cluster) is None or trial.splits or trial.candidate.sequence_parallel:
        return
    for ahead in AHEAD:
        form = replace(trial.candidate, offload_ahead=ahead)
        if offloads(form):
            yield Trial.of(model, form, cluster, buffers=trial.kept.counts_buffers)


def _recomputing(
    model: Workload, trial: Trial, cluster: Cluster, limit: float, ways: Sequence[Recomputed] = AGAIN
) -> Iterator[Trial | Miss]:
    """A trial with the fewest microbatches recomputed that fit. ways: to recompute, "full" first"""
    if trial.least_bytes > limit:
        yield Miss(trial.least_bytes, trial.candidate)
        return
    if all(trial.fits(limit)):
        yield trial
        return
    for what in ways:
        form = _recomputed(model, trial, cluster, limit, what)
        yield form
        if isinstance(form, Miss):  # nothing holds less
            return


def simulated_within(trial: Trial, limit: float) -> Estimate | Miss:
    """A run whose activations fit; its messages may be too much."""
    run = trial.estimate()
    return run if run.nbytes <= limit else Miss(run.nbytes, run.candidate)


def _recomputed(
    model: Workload, kept: Trial, cluster: Cluster, limit: float, what: Recomputed
) -> Trial | Miss:
    """In the split of a run that recomputes nothing.

    Where that split never fits, with all recomputed in layers split for it.
    """
    everything = replace(kept.candidate, recomputed=what, in_flight=None)
    buffers = kept.kept.counts_buffers
    some = Trial.of(model, everything, cluster, buffers=buffers)
    whole = first_in_flight(some.proof.schedule, None)
    if all(some.fits(limit, whole)):
        return replace(some, candidate=replace(some.candidate, in_flight=some.counts(limit)))
    again = Trial.of(model, replace(everything, split=()), cluster, buffers=buffers)
    if all(again.fits(limit, whole)):
        return again
    needed = (rank.fixed + peak for rank, peak in zip(again.fixed, again.peaks(whole), strict=True))
    return Miss(max(needed), again.candidate)
