"""The timeline of a step shows when each stage's gradients were summed over the ranks beside the pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support import jobs_reductions
from support.pool import Pool

V = {"schedule": "hanayo", "waves": 1}  # two stages a rank, of which one is done before the other


@pytest.mark.parametrize("schedule", ["1f1b", V], ids=str)
def test_each_stage_is_summed_once_after_its_last_backward(pool: Pool, schedule: Any, tmp_path: Path) -> None:
    told = pool.run(4, jobs_reductions.steps, schedule, str(tmp_path))
    for timeline, bubble in told:
        stages = sorted({span.op.stage for span in timeline.spans})
        assert sorted(of.stage for of in timeline.reductions) == stages
        ends: dict[tuple[int, int], float] = {}
        for span in timeline.spans:
            ends[span.rank, span.op.stage] = max(span.end, ends.get((span.rank, span.op.stage), 0.0))
        for of in timeline.reductions:
            assert ends[of.rank, of.stage] <= of.start < of.end
        for span in timeline.spans:  # a rank does one thing at a time
            for of in timeline.reductions:
                assert of.rank != span.rank or of.end <= span.start or span.end <= of.start
        on_last = [of for of in timeline.reductions if of.rank == 1]
        assert min(of.start for of in on_last) < max(s.end for s in timeline.of_rank(0))
        assert bubble == pytest.approx(timeline.bubble)
        for rank, idle in enumerate(timeline.idle):
            sums = sum(of.end - of.start for of in timeline.reductions if of.rank == rank)
            assert idle.reduce == pytest.approx(sums)
            assert sum(idle) + timeline.busy[rank] == pytest.approx(timeline.makespan)
            assert min(idle) >= -1e-9
    for ending in ("svg", "html", "txt"):
        assert "summing gradients beside the pipeline" in (tmp_path / f"step.{ending}").read_text()
