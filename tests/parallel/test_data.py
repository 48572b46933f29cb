"""FSDP2 and HSDP beside the pipeline: loss and every gradient of one process, whatever the mesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock import Axes, Sharded
from support import jobs_mesh
from support.meshes import compare
from support.pool import Pool

CASES: list[tuple[int, Axes, Any]] = [
    (2, Axes(dp_shard=2), "1f1b"),
    (2, Axes(dp_shard=2), "zb_v"),
    (2, Axes(dp_shard=2), "dualpipe_v"),
    (2, Axes(dp_replicate=2), "1f1b"),
    (1, Axes(dp_shard=2, dp_replicate=2), "1f1b"),
    (1, Axes(dp_shard=-1), "1f1b"),
]


@pytest.mark.parametrize(("ranks", "axes", "schedule"), CASES[:2])
def test_as_one_process(pool: Pool, ranks: int, axes: Axes, schedule: str) -> None:
    compare(pool, "llama", ranks, axes, schedule, {})


@pytest.mark.parallel
@pytest.mark.parametrize(("ranks", "axes", "schedule"), CASES[2:])
def test_more_meshes(pool: Pool, ranks: int, axes: Axes, schedule: str) -> None:
    compare(pool, "llama", ranks, axes, schedule, {})


def test_a_tied_head(pool: Pool) -> None:
    compare(pool, "llama", 2, Axes(dp_shard=2), "1f1b", {"tied": True})


@pytest.mark.parallel
def test_gathered_again_for_each_backward(pool: Pool) -> None:
    how = {"sharded": Sharded(reshard_after_forward=True)}
    compare(pool, "llama", 2, Axes(dp_shard=2), "1f1b", how)


def test_verified_beside_the_whole_model(pool: Pool) -> None:
    for passed, largest, told in pool.run(4, jobs_mesh.verified, 2, Axes(dp_shard=2), "1f1b"):
        assert passed
        assert largest < 1e-10
        assert "model.norm.weight" in told


@pytest.mark.parametrize("schedule", ["zb_h1"])
def test_gathered_and_reduced_once_a_step(pool: Pool, schedule: str) -> None:
    """However many microbatches: one gathering and one reduction for each layer and for the rest."""
    for microbatches in (2, 4):
        found = pool.run(4, jobs_mesh.collectives, Axes(dp_shard=2), schedule, microbatches, Sharded())
        for counts in found:
            groups = counts["layers"] + counts["hosted"]
            assert counts["_allgather_base_"] == groups, counts
            assert counts["_reduce_scatter_base_"] == groups, counts


@pytest.mark.parametrize("schedule", ["zb_v"])
def test_computed_in_bfloat16(pool: Pool, schedule: str) -> None:
    for found, expected, kept in pool.run(4, jobs_mesh.in_halves, Axes(dp_shard=2), schedule):
        assert found != expected
        assert found == pytest.approx(expected, rel=1e-2)
        assert kept


@pytest.mark.parametrize("schedule", ["zb_v"])
def test_modules_of_one_s_own(pool: Pool, schedule: str) -> None:
    answers = pool.run(4, jobs_mesh.provided, Axes(dp_shard=2), schedule)
    stages = max(index for _, found in answers for index in found) + 1
    whole = torch.nn.Sequential(*(jobs_mesh.Line(number) for number in range(stages)))
    x, target = jobs_mesh.lines()
    loss = (whole(x) - target).square().mean()
    loss.backward()
    for told, found in answers:
        assert told == pytest.approx(float(loss.detach()), rel=1e-10)
        for index, gradient in found.items():
            expected = whole[index].get_parameter("weight").grad
            assert expected is not None
            assert torch.allclose(gradient, expected, rtol=1e-10, atol=1e-14)
