"""Sums over parts are the account of a build plan, to the byte."""

from __future__ import annotations

from dataclasses import replace

import pytest
from transformers import PretrainedConfig

from penstock.models.split.balanced_split import ranges
from penstock.parallel.axes import Axes
from penstock.pipeline.building.memory import Account
from penstock.planner.candidate import Candidate
from penstock.planner.estimate import Trial
from penstock.planner.workload import Workload
from support.planning import LENGTH, cluster, small_config


@pytest.mark.parametrize("config", [small_config(), small_config(tie_word_embeddings=True)])
@pytest.mark.parametrize(
    ("ranks", "axes", "reshard"),
    [(2, Axes(), False), (1, Axes(dp_shard=4), True), (2, Axes(dp_shard=2), True), (2, Axes(tp=2), False),
     (1, Axes(dp_replicate=2, tp=2), False), (1, Axes(dp_shard=2), False)],
)  # fmt: skip
def test_ranks_hold_what_the_account_says(
    config: PretrainedConfig, ranks: int, axes: Axes, reshard: bool
) -> None:
    model = Workload(config)
    split = (2, 4) if ranks == 2 else (6,)
    run = Candidate(ranks, axes, rows=1, length=LENGTH, microbatches=3, split=split, reshard=reshard)
    trial = Trial.of(model, run, cluster())
    plan = model.plan(trial.proof.schedule, split)
    expected = Account(plan, axes, run.parallel_options()).ranks()
    assert [of._replace(activations=None) for of in trial.fixed] == expected
    assert [len(layers) for layers in ranges(trial.candidate.split)] == list(split)
    tied = bool(config.tie_word_embeddings) and ranks > 1
    assert bool(trial.tied) == tied
    assert replace(run, split=()) != trial.candidate
