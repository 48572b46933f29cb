"""Dropout on a mesh: the same microbatches draw the same as in one process that accumulates over them."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import Axes
from penstock.train.config.sections import TrainConfig
from penstock.train.run import preflight, run
from support import jobs_chance as jobs
from support import jobs_train
from support.pool import Pool
from support.tiny import tree

WHOLE = 4  # microbatches of the whole batch
Case = tuple[str, int, Axes | None, dict[str, Any]]
CASES: list[Case] = [
    ("qwen3", 2, None, {"schedule": "zb_h1"}),
    ("qwen3", 2, None, {"schedule": "dualpipe_v", "activation_checkpointing": True}),
    ("qwen3", 2, Axes(dp_shard=2), {"activation_checkpointing": "selective"}),
    ("gpt2", 2, Axes(dp_replicate=2), {"layout": "E|ttttL"}),
    ("gpt2", 4, None, {"layout": "Et|tt|t|L"}),
    ("gpt_neox", 2, Axes(tp=2), {}),
    ("llama", 2, Axes(dp_shard=2), {}),
    ("gpt2", 2, None, {"schedule": "dualpipe"}),
]


@functools.cache
def in_one_process(family: str) -> list[float]:
    with torch.random.fork_rng(devices=[]):
        return jobs.losses(family, 1, None, WHOLE, {})


@pytest.mark.parametrize(("family", "ranks", "axes", "options"), CASES, ids=str)
def test_a_mesh_draws_what_one_process_does(
    pool: Pool, family: str, ranks: int, axes: Axes | None, options: dict[str, Any]
) -> None:
    parts = 1 if axes is None else axes.batch_parts
    world = ranks * (1 if axes is None else axes.ranks_per_stage)
    expected = in_one_process(family)
    for found in pool.run(world, jobs.losses, family, ranks, axes, WHOLE // parts, options):
        assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("family", [*jobs.DROPPING])
def test_it_does_drop(family: str) -> None:
    """Another seed gives other losses."""
    with torch.random.fork_rng(devices=[]):
        again = jobs.losses(family, 1, None, WHOLE, {})
        other = jobs.losses(family, 1, None, WHOLE, {}, seed=8)
    assert again == in_one_process(family)
    assert abs(again[0] - other[0]) > 1e-4


def test_ranks_that_were_seeded_otherwise(pool: Pool) -> None:
    """Those of tp would else drop different values of what they hold alike."""
    one, other = pool.run(2, jobs.alike_by_rank)
    assert len(one) > 4
    assert one == pytest.approx(other, rel=1e-9, abs=1e-12)


def test_ranks_of_a_pipeline_alone_that_were_seeded_otherwise(pool: Pool) -> None:
    """0.5.0 agreed on a seed where axes were given only."""
    with torch.random.fork_rng(devices=[]):
        apart = [jobs.seeded_by_rank([seed]) for seed in (3, 2)]
    one, other = pool.run(2, jobs.seeded_by_rank, [3, 2])
    assert one == other
    assert one in apart


def test_a_stage_in_evaluation_on_one_rank(pool: Pool) -> None:
    """0.5.0 left the others waiting for it. And where all are, torch's generator stays as it was."""
    assert pool.run(2, jobs.one_in_evaluation) == [(True, True)] * 2


def test_a_batch_that_one_rank_refuses_leaves_the_generators_alike(pool: Pool) -> None:
    assert pool.run(2, jobs.refused_on_one) == [True] * 2


def test_stages_of_ones_own_draw_each_its_own() -> None:
    """In 0.5.0 both dropped the same, and a half was left."""
    with torch.random.fork_rng(devices=[]):
        assert abs(jobs.kept_by_two() - 0.25) < 0.03


def test_modules_of_ones_own(pool: Pool) -> None:
    with torch.random.fork_rng(devices=[]):
        expected, _ = jobs.provided(None, WHOLE)
    found = pool.run(4, jobs.provided, Axes(dp_shard=2), WHOLE // 2)
    assert all(alike for _, alike in found)
    assert [loss for loss, _ in found] == [pytest.approx(expected, rel=1e-12)] * 4


@pytest.mark.parametrize("packing", ["stream", "best_fit"])
def test_the_trainer_needs_no_option_for_it(pool: Pool, tmp_path: Path, packing: str) -> None:
    """Rows of one length, dealt out in order; and microbatches that go round the parts by their length."""
    made = tree(tmp_path)
    made["model"] = {"config": {**made["model"]["config"], "attention_dropout": 0.3}, "dtype": "float64"}
    made["train"] |= {"steps": 3, "batch_size": 8, "evaluate_every": 3, "check": "off"}
    made["data"]["packing"] = packing
    one = {**made, "pipeline": {**made["pipeline"], "ranks": 1, "microbatches": 4}}
    one["output"] = {"folder": str(tmp_path / "one")}
    other = {**made, "pipeline": {**made["pipeline"], "ranks": 2, "microbatches": 2}}
    other["parallel"] = {"dp_shard": 2}
    with torch.random.fork_rng(devices=[]):
        run(preflight(TrainConfig.model_validate(one)))
    told = pool.run(4, jobs_train.trained, other)
    assert [each["error"] for each in told] == [""] * 4
    found = [losses(Path(made["output"]["folder"])), losses(tmp_path / "one")]
    assert len(found[0]) == 4
    assert found[0] == pytest.approx(found[1], rel=1e-9)


def losses(output: Path) -> list[float]:
    rows = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return [row.get("loss", row.get("held_out_loss")) for row in rows if row["step"]]
