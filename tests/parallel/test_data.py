"""FSDP2 and HSDP beside the pipeline: loss and every gradient of one process, whatever the mesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock import Axes, Sharded
from support import jobs_mesh
from support.families import tiny_model
from support.pool import Pool
from support.reference import plain_step

CASES: list[tuple[int, Axes, Any]] = [
    (2, Axes(dp_shard=2), "1f1b"),
    (2, Axes(dp_shard=2), "zb_v"),
    (2, Axes(dp_shard=2), "dualpipe_v"),
    (2, Axes(dp_replicate=2), "1f1b"),
    (1, Axes(dp_shard=2, dp_replicate=2), "1f1b"),
    (1, Axes(dp_shard=-1), "1f1b"),
]


@pytest.mark.parametrize(("ranks", "axes", "schedule"), CASES)
def test_as_one_process(pool: Pool, ranks: int, axes: Axes, schedule: str) -> None:
    compare(pool, "llama", ranks, axes, schedule, Sharded(), {})


def test_a_tied_head(pool: Pool) -> None:
    compare(pool, "llama", 2, Axes(dp_shard=2), "1f1b", Sharded(), {"tied": True})


def test_gathered_again_for_each_backward(pool: Pool) -> None:
    compare(pool, "llama", 2, Axes(dp_shard=2), "1f1b", Sharded(reshard_after_forward=True), {})


def compare(
    pool: Pool, family: str, ranks: int, axes: Axes, schedule: Any, sharded: Sharded, options: dict[str, Any]
) -> None:
    world = 4
    found = pool.run(world, jobs_mesh.data_parallel, family, ranks, axes, schedule, sharded, options)
    model = tiny_model(family, torch.float64, layers=4, tied=options.get("tied", False))
    whole = jobs_mesh.batch()
    loss, expected = plain_step(model, whole)
    norm = torch.stack([expected[name].norm() for name, _ in model.named_parameters()]).norm()  # tied: once
    names = set()
    for told in found:
        assert told["loss"] == [pytest.approx(loss, rel=1e-10)] * 2
        assert told["evaluated"] == pytest.approx(loss, rel=1e-10)
        assert told["tokens"] == int((whole["labels"][:, 1:] != -100).sum())
        assert told["worst"] < 1e-10, told["rank"]
        assert told["norm"] == pytest.approx(2 * float(norm), rel=1e-9)
        names |= set(told["names"])
    assert names >= set(expected)


def test_verified_beside_the_whole_model(pool: Pool) -> None:
    for passed, largest, told in pool.run(4, jobs_mesh.verified, 2, Axes(dp_shard=2), "1f1b"):
        assert passed
        assert largest < 1e-10
        assert "model.norm.weight" in told


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_gathered_and_reduced_once_a_step(pool: Pool, schedule: str) -> None:
    """However many microbatches: one gathering and one reduction for each layer and for the rest."""
    for microbatches in (2, 4):
        found = pool.run(4, jobs_mesh.collectives, Axes(dp_shard=2), schedule, microbatches, Sharded())
        for counts in found:
            groups = counts["layers"] + counts["hosted"]
            assert counts["_allgather_base_"] == groups, counts
            assert counts["_reduce_scatter_base_"] == groups, counts
