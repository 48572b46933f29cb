"""A plan's config is one that `penstock train` takes, and its dry run says the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from penstock.cli.dry_run import memory
from penstock.models.source import sdpa_for_flash
from penstock.parallel.axes import Axes
from penstock.planner.candidate import Candidate
from penstock.planner.estimate import estimate
from penstock.planner.run_config import run_config
from penstock.train.config.load import load_config
from penstock.train.preflight import dry_run
from support.mesh import later
from support.planning import LENGTH, assert_near, cluster, small_config, workload

RUN = Candidate(2, rows=2, length=LENGTH, microbatches=4)


@pytest.mark.parametrize(
    "run",
    [
        replace(RUN, axes=Axes(dp_shard=2), schedule="zb_v"),
        replace(RUN, axes=Axes(tp=2), sequence_parallel=True, recomputed="full"),
        replace(RUN, schedule="1f1b", options=(("stages_per_rank", 2),), recomputed="full", in_flight=(1, 1)),
        *later(
            (RUN,),
            (replace(RUN, ranks=1, axes=Axes(dp_shard=2, dp_replicate=2), recomputed="full", reshard=True),),
            mark=pytest.mark.sweep,
        ),
    ],
)
def test_a_dry_run_agrees_with_the_plan(run: Candidate, tmp_path: Path) -> None:
    small_config().save_pretrained(tmp_path)
    predicted = estimate(workload(), run, cluster())
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(run_config(predicted.candidate, {"path": str(tmp_path)})))
    config = load_config(path)
    assert config.train.batch_size == run.batch
    with sdpa_for_flash():
        planned = dry_run(config)
        needs = memory(planned)
    assert tuple(len(stage.layers) for stage in planned.plan.stages) == predicted.candidate.split
    assert planned.plan.schedule.programs == run.built().programs
    for mine, theirs in zip(predicted.memory, needs, strict=True):
        assert_near(mine, theirs, RUN.rows)
