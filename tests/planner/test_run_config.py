"""A plan's config is one that `penstock train` takes, and its dry run says the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from penstock.cli.dry_run import memory
from penstock.models.source import sdpa_for_flash
from penstock.parallel.axes import Axes
from penstock.planner.candidate import Candidate
from penstock.planner.estimate import estimate
from penstock.planner.run_config import run_config
from penstock.train.config.load import load_config
from penstock.train.preflight import dry_run
from support.planning import LENGTH, cluster, small_config, workload

RUN = Candidate(2, rows=2, length=LENGTH, microbatches=4)


@pytest.mark.parametrize(
    "run",
    [
        RUN,
        replace(RUN, axes=Axes(dp_shard=2), schedule="zb_v"),
        replace(RUN, axes=Axes(tp=2), sequence_parallel=True, recomputed="full"),
        replace(RUN, ranks=1, axes=Axes(dp_shard=2, dp_replicate=2), recomputed="full", reshard=True),
        replace(RUN, schedule="1f1b", options=(("stages_per_rank", 2),), recomputed="full", in_flight=(1, 1)),
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
        assert mine._replace(activations=0) == theirs._replace(activations=0)
        # a plan sums parts, which end in hidden states that stages free: two of a microbatch at most
        hidden_states = 2 * RUN.rows * LENGTH * small_config().hidden_size * torch.float32.itemsize
        assert theirs.activations is not None
        near = 0.02 * theirs.activations + hidden_states
        assert mine.activations == pytest.approx(theirs.activations, abs=near)
