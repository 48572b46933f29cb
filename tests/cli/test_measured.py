"""What `penstock plan --measure` prints and chooses, of runs that only pretend to be measured."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.cli import measured as command
from penstock.cli.measured import compared, fastest, measured_finalists
from penstock.errors import RunError
from penstock.planner.candidate import Candidate
from penstock.planner.corrections import MeasuredRun
from penstock.planner.estimate import Estimate, estimate
from penstock.planner.hardware import read_cluster
from support.planning import LENGTH, workload
from support.refusals import refuses

CLUSTER = read_cluster({"host": "CPU host", "devices": 2})
PLANS = [Candidate(2, rows=rows, length=LENGTH, microbatches=8 // rows, split=(3, 3)) for rows in (1, 2, 4)]


def runs(*factors: float) -> list[MeasuredRun]:
    """Runs that took so many times as long as predicted; 0 for one that failed."""
    made = []
    for candidate, factor in zip(PLANS, factors, strict=True):
        run = estimate(workload(), candidate, CLUSTER)
        spans = sum(span.end - span.start for span in run.timeline.spans) / run.timeline.ranks
        took = MeasuredRun(run, (factor * run.seconds,), spans / run.seconds, 2**20, 2**20)
        made.append(took if factor else MeasuredRun(run, error="no room"))
    return made


def test_predicted_measured_and_corrected_stand_beside_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    measured = runs(2.0, 2.0, 2.0)
    better = compared(workload(), measured, CLUSTER)
    printed = capsys.readouterr().out
    assert printed.count("-50.0%") == 3  # predicted: half of what was measured
    assert "ops take 2.000 times as long as predicted" in printed
    for run in measured:
        again = estimate(workload(), run.estimate.candidate, better)
        assert f"{run.seconds:.4g}" in printed
        assert f"{again.seconds:.4g}" in printed
        assert again.seconds == pytest.approx(run.seconds, rel=0.05)


def test_the_fastest_measured_is_chosen_and_a_failed_run_is_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    measured = runs(0, 9.0, 1.0)
    compared(workload(), measured, CLUSTER)
    printed = capsys.readouterr().out
    assert "1 failed and is left out: no room" in printed
    best, seconds = fastest(measured)
    assert best.candidate == PLANS[2]
    assert seconds == measured[2].seconds
    assert f"the fastest measured: pp=2 1f1b, {PLANS[2].microbatches} x 4" in printed


def test_without_any_run_it_is_one_error() -> None:
    with refuses(RunError, rule="none of them ran: no room"):
        compared(workload(), runs(0, 0, 0), CLUSTER)


@pytest.mark.parametrize(("processors", "shared"), [(1, True), (2, False)])
def test_shared_processors_are_told(
    processors: int, shared: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: processors)
    compared(workload(), runs(1.0, 1.0, 1.0), CLUSTER)
    assert ("2 processes share 1 processors" in capsys.readouterr().out) == shared


def test_finalists_run_in_order_on_the_clusters_kind_of_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Estimate, bool]] = []

    def pretended(_: Any, run: Estimate, *__: Any, on_cpu: bool) -> MeasuredRun:
        asked.append((run, on_cpu))
        return MeasuredRun(run, (1.0,))

    monkeypatch.setattr(command, "measured_run", pretended)
    plans = [run.estimate for run in runs(1.0, 1.0, 1.0)]
    taken = list(measured_finalists(workload(), plans, CLUSTER, {}))
    assert asked == [(plan, True) for plan in plans]
    assert [run.estimate for run in taken] == plans
