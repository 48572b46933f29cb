"""The benchmark of local plans: how ranks share cores, and which of its bars hold for what was measured."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks import local_plans
from benchmarks.local_plans import Setting, measure, plans_of
from benchmarks.shared_cores import shared_makespan, shared_step

from penstock.planner.candidate import Candidate
from penstock.planner.corrections import MeasuredRun
from penstock.planner.estimate import Estimate, Trial, optimizer_seconds
from penstock.planner.hardware import read_cluster
from penstock.schedule import Costs, build, simulate, verify
from support.planning import LENGTH, small_config, workload

SMALL = Setting(small_config(num_hidden_layers=8), batch=16, length=32, seconds=2.0, steps=4)
CLUSTER = read_cluster({"host": "CPU host", "devices": 4})
COSTS = Costs(forward=[1.0, 2.0, 1.5, 1.0], input_grad=2.0, weight_grad=1.0, communication=0.25)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_ranks_with_a_core_each_take_the_simulated_time(schedule: str) -> None:
    proof = verify(build(schedule, ranks=4, microbatches=6))
    assert shared_makespan(proof, COSTS, 4) == pytest.approx(simulate(proof, COSTS).makespan)


def test_one_core_is_never_idle_but_for_messages() -> None:
    proof = verify(build("1f1b", ranks=4, microbatches=6))
    costs = Costs(forward=[1.0, 2.0, 1.5, 1.0], input_grad=2.0, weight_grad=1.0)
    work = 6 * (5.5 + 4 * 3.0)
    assert shared_makespan(proof, costs, 1) == pytest.approx(work)
    assert work / 2 < shared_makespan(proof, costs, 2) < work


def test_three_ops_on_two_cores_run_at_two_thirds_of_their_rate() -> None:
    """The clocks of GPipe's forwards have 1, 2, 3, 2 and 1 ops; only the third has more ops than cores."""
    proof = verify(build("gpipe", ranks=3, microbatches=3))
    costs = Costs(forward=1.0, input_grad=0.0, weight_grad=0.0)
    assert shared_makespan(proof, costs, 2) == pytest.approx(1 + 1 + 1.5 + 1 + 1)


def test_the_optimizers_share_the_cores() -> None:
    run = Candidate(4, rows=2, length=LENGTH, microbatches=4, split=(2, 2, 1, 1))
    trial = Trial.of(workload(), run, CLUSTER)
    optimizers = [optimizer_seconds([rank], CLUSTER.device) for rank in trial.fixed]
    alone, shared = (
        shared_step(trial, cores) - shared_makespan(trial.proof, trial.costs(), cores) for cores in (4, 1)
    )
    assert alone == pytest.approx(trial.after())
    assert shared == pytest.approx(trial.after() - max(optimizers) + sum(optimizers))


@pytest.mark.parametrize("ranks", [2, 4])
def test_eight_plans_differ(ranks: int) -> None:
    plans = plans_of(SMALL, ranks)
    assert len(set(plans.values())) == 8
    for candidate in plans.values():
        assert candidate.batch == SMALL.batch
        candidate.built()


def pretended(factor: float, late: str = "") -> Any:
    """A stand-in for a run of the trainer: it takes so many times as long; the schedule `late` twice that."""

    def run_of(_: Any, run: Estimate, *__: Any, **___: Any) -> MeasuredRun:
        seconds = factor * run.seconds * (2 if run.candidate.schedule == late else 1)
        ops = sum(span.end - span.start for span in run.timeline.spans) / run.timeline.ranks
        return MeasuredRun(run, (seconds,), factor * ops / seconds, 1000, 1000)

    return run_of


@pytest.fixture
def setting(monkeypatch: pytest.MonkeyPatch) -> Setting:
    """Two ranks, on which runs only pretend to be measured."""
    monkeypatch.setattr(local_plans, "calibrated", lambda _: CLUSTER)
    monkeypatch.setattr(local_plans, "busy", lambda: 0.0)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    return SMALL._replace(ranks=(2,))


def test_a_calibration_that_is_wrong_by_one_factor_misses_and_its_correction_meets(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_plans, "measured_run", pretended(1.5))
    rows = measure(2, setting).rows
    by_what = {what: [row.met for row in rows if row.what == what] for what in {row.what for row in rows}}
    assert by_what["step, calibrated / measured"] == [False] * 8
    assert by_what["step, corrected / measured"] == [None, *[True] * 7]  # the first is what it was fitted to
    assert by_what["memory, predicted / measured"] == [True] * 8
    assert rows[-1].met


def test_a_plan_that_is_slower_than_predicted_misses(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_plans, "measured_run", pretended(1.0, late="zb_h1"))
    rows = measure(2, setting).rows
    missed = {row.case for row in rows if row.met is False}
    assert missed == {"P=2: zb_h1"}


def test_no_time_is_judged_while_others_run(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_plans, "measured_run", pretended(1.5))
    monkeypatch.setattr(local_plans, "busy", lambda: 0.5)
    rows = measure(1, setting).rows
    times = [row for row in rows if not row.what.startswith("memory")]
    assert {row.met for row in times} == {None}
    assert sum(not row.resolved for row in times) == 2 * 8 - 1 + 1
    assert [row.met for row in rows if row.what.startswith("memory")] == [True] * 8
