"""Constants that were wrong by known factors are corrected by just these, from runs that were measured.

A run is "measured" here by predicting it for the cluster as it truly is.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.parallel.axes import Axes
from penstock.planner.candidate import Candidate
from penstock.planner.corrections import Correction, MeasuredRun, corrected, correction
from penstock.planner.estimate import estimate
from penstock.planner.hardware import Cluster
from support.planning import LENGTH, cluster, workload

RUNS = [
    Candidate(2, rows=2, length=LENGTH, microbatches=4, split=(3, 3)),
    Candidate(2, rows=1, length=LENGTH, microbatches=8, split=(4, 2)),
    Candidate(1, Axes(dp_shard=2), rows=2, length=LENGTH, microbatches=2, split=(6,)),
]
NEAR = cluster(hosts=1, devices=2)
FAR = cluster(hosts=2, devices=1)
SLOW_LINK = FAR.model_copy(
    update={"between": FAR.between and FAR.between.model_copy(update={"bandwidth": 1e8, "latency": 1e-4})}
)


def measured(candidate: Candidate, assumed: Cluster, truth: Cluster) -> MeasuredRun:
    took = estimate(workload(), candidate, truth)
    ops = sum(span.end - span.start for span in took.timeline.spans) / took.timeline.ranks
    run = estimate(workload(), candidate, assumed)
    return MeasuredRun(run, (took.seconds,) * 3, ops / took.seconds)


@pytest.mark.parametrize("compute", [0.25, 1.0, 3.0])
def test_every_step_and_op_scales_by_the_factor_of_compute(compute: float) -> None:
    """Also where the device turns out to be faster than its peak: no share exceeds 1."""
    usual, slower = NEAR, corrected(NEAR, Correction(compute))
    shares = slower.device.efficiencies
    assert max(shares.matmul, shares.attention, shares.memory) <= 1
    alone = replace(RUNS[0], ranks=1, split=(6,))
    ops, others = (estimate(workload(), alone, where).seconds for where in (usual, slower))
    assert others == pytest.approx(compute * ops, rel=1e-9)
    assert slower.inside == usual.inside


@pytest.mark.parametrize("compute", [0.5, 2.0])
def test_a_wrong_speed_is_corrected_from_runs(compute: float) -> None:
    truth = corrected(NEAR, Correction(compute))
    runs = [measured(candidate, NEAR, truth) for candidate in RUNS[:2]]
    factors = correction(workload(), NEAR, runs)
    assert factors.compute == pytest.approx(compute, rel=1e-6)
    for run in runs:
        again = estimate(workload(), run.estimate.candidate, corrected(NEAR, factors))
        assert again.seconds == pytest.approx(run.seconds, rel=0.01)


def test_one_run_with_other_work_beside_it_does_not_matter() -> None:
    runs = [measured(candidate, NEAR, NEAR) for candidate in RUNS]
    runs[1] = replace(runs[1], steps=tuple(5 * step for step in runs[1].steps))
    assert correction(workload(), NEAR, runs).compute == pytest.approx(1.0)


def test_links_are_corrected_where_runs_wait_for_them() -> None:
    truth = corrected(SLOW_LINK, Correction(1.5, 3.0))
    runs = [measured(candidate, SLOW_LINK, truth) for candidate in RUNS]
    factors = correction(workload(), SLOW_LINK, runs)
    assert factors.compute == pytest.approx(1.5, rel=1e-6)
    assert factors.links == pytest.approx(3.0, rel=0.01)


def test_links_stay_where_no_links_explain_the_times() -> None:
    runs = [measured(candidate, SLOW_LINK, SLOW_LINK) for candidate in RUNS]
    late = [replace(run, steps=(1000 * run.seconds,), computing=run.computing / 1000) for run in runs]
    factors = correction(workload(), SLOW_LINK, late)
    assert factors.compute == pytest.approx(1.0)
    assert factors.links is None


def test_links_stay_where_no_run_waits_for_them() -> None:
    runs = [measured(candidate, NEAR, NEAR) for candidate in RUNS[:2]]
    compute = replace(runs[0], steps=(2 * runs[0].seconds,))
    factors = correction(workload(), NEAR, [compute])
    assert factors.links is None
    better = corrected(NEAR, factors)
    assert better.inside == NEAR.inside
