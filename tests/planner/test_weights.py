"""Sums over parts are the account of a build plan, to the byte."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.models.split.balanced_split import ranges
from penstock.parallel.axes import Axes
from penstock.pipeline.building.memory import Account
from penstock.planner.candidate import Candidate
from penstock.planner.estimate import Trial
from support.planning import LENGTH, cluster, workload

RUNS = [
    (2, Axes(), False), (1, Axes(dp_shard=4), True), (2, Axes(dp_shard=2), True), (2, Axes(tp=2), False),
    (1, Axes(dp_replicate=2, tp=2), False), (1, Axes(dp_shard=2), False),
]  # fmt: skip
TIED = [RUNS[0], RUNS[1], RUNS[3]]  # two copies, sharded, and with the vocabulary over tp


@pytest.mark.parametrize(
    ("is_tied", "ranks", "axes", "reshard"),
    [
        *((False, *run) for run in RUNS),
        *(pytest.param(True, *run, marks=() if run in TIED else pytest.mark.sweep) for run in RUNS),
    ],
)
def test_ranks_hold_what_the_account_says(is_tied: bool, ranks: int, axes: Axes, reshard: bool) -> None:
    model = workload(tie_word_embeddings=True, vocab_size=4096) if is_tied else workload()
    split = (2, 4) if ranks == 2 else (6,)
    run = Candidate(ranks, axes, rows=1, length=LENGTH, microbatches=3, split=split, reshard=reshard)
    trial = Trial.of(model, run, cluster())
    plan = model.plan(trial.proof.schedule, split)
    expected = Account(plan, axes, run.parallel_options()).ranks()
    assert [of._replace(activations=None) for of in trial.fixed] == expected
    assert [len(layers) for layers in ranges(trial.candidate.split)] == list(split)
    assert bool(trial.tied) == (is_tied and ranks > 1)
    assert replace(run, split=()) != trial.candidate
