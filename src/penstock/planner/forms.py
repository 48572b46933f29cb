"""The forms of a run: what recomputes, offloads and chunks of logits make fit, from the fastest on.

    nothing         all activations stay on the device, logits are whole
    chunks          large logits in chunks: the head runs once more, and the last stage holds less at work
    offloading      activations wait in host memory; free where copies take no longer than the ops beside them
    recomputation   layers run again, in as few microbatches in flight as the memory asks for
    both            activations wait in host memory, and some layers run again

A form is tried where those that save less do not fit. None is faster than the run that saves nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from penstock.planner.at_hand import is_cpu
from penstock.planner.candidate import Candidate, Recomputed
from penstock.planner.estimate import Estimate, Trial, offloads
from penstock.planner.hardware import Cluster
from penstock.planner.workload import Workload
from penstock.schedule.simulation.recompute import first_in_flight

AGAIN: tuple[Recomputed, ...] = ("full", "selective")
AHEAD = (2, 1)  # ops beside a copy: F and B, or one of them
_AS_FAST = 1.001  # as the run that saves nothing: no other form is tried


class Miss(NamedTuple):
    """A run that does not fit, and the bytes that its fullest rank needs at least."""

    nbytes: float
    candidate: Candidate

    def __lt__(self, other: Any) -> bool:
        return bool(self.nbytes < other.nbytes)


def offload_rate(cluster: Cluster) -> float:
    """Bytes/s that a device moves to the host's memory. 0 for a CPU, whose memory that is."""
    return 0.0 if is_cpu(cluster.device) else cluster.host_link.rate


def fastest_form(model: Workload, candidate: Candidate, cluster: Cluster, limit: float) -> Estimate | Miss:
    """The fastest form of a run that fits into `limit`, without messages.

    Weights are gathered layer by layer where gathered whole they do not fit.
    """
    trials = [_trial(model, loss, cluster, limit) for loss in model.losses(candidate)]
    if all(trials[0].fits(limit)):
        return simulated_within(trials[0], limit)
    fastest, fitting, missed = trials[0].estimate().seconds, list[Estimate](), list[Miss]()
    for form in _forms(model, trials, cluster, limit):
        if isinstance(form, Miss):
            missed.append(form)
            continue
        if form.seconds <= fastest * _AS_FAST:
            return form
        fitting.append(form)
    return min(fitting, key=lambda form: form.seconds) if fitting else min(missed)


def _forms(model: Workload, trials: list[Trial], cluster: Cluster, limit: float) -> Iterator[Estimate | Miss]:
    """trials: with whole logits, which do not fit, and in chunks; all else kept"""
    offloading = [form for trial in trials for form in _offloading(model, trial, cluster)]
    for trial in (*trials[1:], *offloading):
        if all(trial.fits(limit)):
            yield simulated_within(trial, limit)
    for trial in trials:
        if not all(trial.fits(limit)):
            yield least_recomputed(model, trial, cluster, limit)
    for trial in offloading:
        if not all(trial.fits(limit)):
            yield least_recomputed(model, trial, cluster, limit, ("full",))  # its other results never leave


def _trial(model: Workload, candidate: Candidate, cluster: Cluster, limit: float) -> Trial:
    trial = Trial.of(model, candidate, cluster, buffers=False)
    if candidate.sharded and max(rank.fixed for rank in trial.fixed) > limit:
        return Trial.of(model, replace(candidate, reshard=True), cluster, buffers=False)
    return trial


def _offloading(model: Workload, trial: Trial, cluster: Cluster) -> Iterator[Trial]:
    """The trial with its activations in host memory, where the schedule has some leave and returns them."""
    if not offload_rate(cluster) or trial.splits:
        return
    for ahead in AHEAD:
        form = replace(trial.candidate, offload_ahead=ahead)
        if offloads(form):
            yield Trial.of(model, form, cluster, buffers=trial.kept.counts_buffers)


def least_recomputed(
    model: Workload, trial: Trial, cluster: Cluster, limit: float, ways: Sequence[Recomputed] = AGAIN
) -> Estimate | Miss:
    """The fastest form of a trial that fits: layers run again in as few microbatches as the memory asks for.

    Messages hold memory where those of `trial` do. ways: to recompute, "full" first
    """
    if trial.least_bytes > limit:
        return Miss(trial.least_bytes, trial.candidate)
    if all(trial.fits(limit)):
        return simulated_within(trial, limit)
    forms = []
    for what in ways:
        form = _recomputed(model, trial, cluster, limit, what)
        if isinstance(form, Estimate):
            forms.append(form)
        elif what == "full":  # nothing holds less
            return form
    return min(forms, key=lambda run: run.seconds)


def simulated_within(trial: Trial, limit: float) -> Estimate | Miss:
    """A run whose activations fit; its messages may be too much."""
    run = trial.estimate()
    return run if run.nbytes <= limit else Miss(run.nbytes, run.candidate)


def _recomputed(
    model: Workload, kept: Trial, cluster: Cluster, limit: float, what: Recomputed
) -> Estimate | Miss:
    """With the fewest microbatches recomputed that fit, in the split of a run that recomputes nothing.

    Where that split never fits, with all recomputed in layers split for it.
    """
    everything = replace(kept.candidate, recomputed=what, in_flight=None)
    buffers = kept.kept.counts_buffers
    some = Trial.of(model, everything, cluster, buffers=buffers)
    whole = first_in_flight(some.proof.schedule, None)
    if all(some.fits(limit, whole)):
        fewer = replace(some.candidate, in_flight=some.counts(limit))
        return simulated_within(replace(some, candidate=fewer), limit)
    again = Trial.of(model, replace(everything, split=()), cluster, buffers=buffers)
    if all(again.fits(limit, whole)):
        return simulated_within(again, limit)
    needed = (rank.fixed + peak for rank, peak in zip(again.fixed, again.peaks(whole), strict=True))
    return Miss(max(needed), again.candidate)
