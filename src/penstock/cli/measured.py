"""``penstock plan --measure``: finalists run for a few steps, beside what was predicted for them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

from penstock.cli.shared import echo, table
from penstock.errors import RunError
from penstock.planner.at_hand import is_cpu
from penstock.planner.corrections import Correction, MeasuredRun, corrected, correction
from penstock.planner.estimate import Estimate, estimate
from penstock.planner.hardware import Cluster
from penstock.planner.workload import Workload
from penstock.train.measured_runs import STEPS, WARM_UP, measured_run, what_is_kept

_SAME = 0.01  # a smaller change of a constant is not worth words


def measured_finalists(
    model: Workload, finalists: Sequence[Estimate], cluster: Cluster, named: dict[str, Any]
) -> Iterator[MeasuredRun]:
    """Run them one after the other on this machine, and say which one runs. named: as for `measured_run`"""
    echo(f"\nmeasuring {len(finalists)} runs of {STEPS} steps on this machine")
    for rank, run in enumerate(finalists, 1):
        print(f"  {rank} of {len(finalists)}: {_named(run)}", flush=True)
        yield measured_run(model, run, cluster, named, on_cpu=is_cpu(cluster.device))


def compared(model: Workload, runs: Sequence[MeasuredRun], cluster: Cluster) -> Cluster:
    """Print predicted, measured and corrected, and return the corrected cluster.

    Raises RunError where every run failed.
    """
    ran = [run for run in runs if not run.error]
    for rank, run in enumerate(runs, 1):
        if run.error:
            echo(f"  {rank} failed and is left out: {run.error}")
    if not ran:
        rule = f"none of them ran: {runs[0].error}"
        raise RunError(f"--measure {len(runs)}", rule, "Leave --measure out, or correct what they miss")
    factors = correction(model, cluster, ran)
    better = corrected(cluster, factors)
    again = {id(run): estimate(model, run.estimate.candidate, better) for run in ran}
    rows = [
        [str(rank), _named(run.estimate), *_cells(run, again[id(run)])]
        for rank, run in enumerate(runs, 1)
        if not run.error
    ]
    heads = ("", "run", "s/step", "measured", "error", "corrected", "error", "GiB", "measured", "error")
    echo("", table(heads, rows, left=("run",), gap=1))
    echo("", *_words(factors, cluster))
    best, seconds = fastest(runs)
    echo(f"the fastest measured: {_named(best)}, {seconds:.4g} s a step")
    return better


def fastest(runs: Sequence[MeasuredRun]) -> tuple[Estimate, float]:
    """The run whose measured step is the shortest, and that step's seconds."""
    best = min((run for run in runs if not run.error), key=lambda run: run.seconds)
    return best.estimate, best.seconds


def _named(run: Estimate) -> str:
    candidate = run.candidate
    sizes = f"{candidate.microbatches} x {candidate.rows}"
    return f"{candidate.mesh} {candidate.label}, {sizes}, recomputed {candidate.recomputation}"


def _cells(run: MeasuredRun, better: Estimate) -> Iterator[str]:
    predicted = run.estimate.seconds
    yield f"{predicted:.4g}"
    yield f"{run.seconds:.4g}"
    yield f"{predicted / run.seconds - 1:+.1%}"
    yield f"{better.seconds:.4g}"
    yield f"{better.seconds / run.seconds - 1:+.1%}"
    yield f"{run.predicted_kept / 2**30:.3f}"
    yield f"{run.kept / 2**30:.3f}"
    yield f"{run.predicted_kept / run.kept - 1:+.1%}" if run.kept else ""


def _words(factors: Correction, cluster: Cluster) -> Iterator[str]:
    """What was compared, and what was corrected."""
    on_cpu = is_cpu(cluster.device)
    yield f"s/step: medians of steps {WARM_UP + 1} to {STEPS}; GiB: {what_is_kept(on_cpu=on_cpu)}"
    if on_cpu and cluster.world > (processors := os.cpu_count() or 1):
        yield (
            f"{cluster.world} processes share {processors} processors: the prediction gives each its own, "
            "and the correction makes up for it as a mean only"
        )
    yield f"corrected: ops take {factors.compute:.3f} times as long as predicted{_barely(factors.compute)}"
    if factors.links is None:
        yield "links stay: the runs wait too little for them, or no links explain their times"
    else:
        yield f"corrected: messages take {factors.links:.3f} times as long{_barely(factors.links)}"


def _barely(factor: float) -> str:
    return ", which is about what was predicted" if abs(factor - 1) < _SAME else ""
