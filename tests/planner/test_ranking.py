"""The table of the best runs has what each of them predicts."""

from __future__ import annotations

import pytest

from penstock.parallel.axes import Axes
from penstock.planner.candidate import Candidate
from penstock.planner.estimate import estimate
from penstock.planner.ranking import HEADS, WORDS, exposed_shares, ranked_rows
from support.planning import LENGTH, cluster, workload


def test_a_run_has_a_cell_for_each_column() -> None:
    candidate = Candidate(2, Axes(tp=2), rows=2, length=LENGTH, microbatches=4, recomputed="full")
    run = estimate(workload(), candidate, cluster())
    first, second = ranked_rows([run, run])
    cells = dict(zip(HEADS, first, strict=True))
    assert second[1:] == first[1:]
    assert (first[0], second[0]) == ("1", "2")
    assert set(WORDS) < set(HEADS)
    assert (cells["mesh"], cells["schedule"], cells["microbatches"]) == ("pp=2 x tp=2", "1f1b", "4 x 2")
    assert cells["recomputed"] == "full"
    assert float(cells["s/step"]) == pytest.approx(run.seconds, rel=1e-3)
    assert float(cells["GiB"]) == pytest.approx(run.nbytes / 2**30, abs=0.05)
    shares = exposed_shares(run)
    assert shares["tp"] == run.exposed["tp"] / run.seconds
    assert cells["exposed"].startswith(f"{next(iter(shares))} ")
