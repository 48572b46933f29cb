"""The equivalence matrix on eight processes: each axis beside the pipeline, and any two others that fit."""

from __future__ import annotations

from typing import Any

import pytest

from penstock import Axes
from support.meshes import compare
from support.pool import Pool

pytestmark = pytest.mark.parallel

SCHEDULES: dict[str, Any] = {
    "1f1b": "1f1b",
    "interleaved_zero_bubble": {"schedule": "1f1b", "stages_per_rank": 2, "zero_bubble": True},
    "dualpipe_v": "dualpipe_v",
}
RING = {"context": "ring"}
DENSE: list[tuple[Axes, dict[str, Any]]] = [
    (Axes(dp_replicate=2), {}),
    (Axes(dp_shard=4), {}),
    (Axes(cp=4), {}),
    (Axes(cp=4), RING),
    (Axes(tp=2), {}),
    (Axes(dp_replicate=2, dp_shard=2), {}),
    (Axes(dp_replicate=2, cp=2), {}),
    (Axes(dp_replicate=2, tp=2), {}),
    (Axes(dp_shard=2, cp=2), RING),
    (Axes(dp_shard=2, tp=2), {}),
    (Axes(cp=2, tp=2), {}),
    (Axes(cp=2, tp=2), RING),
]
MIXTURE: list[tuple[Axes, dict[str, Any]]] = [
    (Axes(dp_shard=4, ep=4), {}),
    (Axes(dp_shard=4, ep=2), {}),
    (Axes(cp=4, ep=4), {}),
    (Axes(cp=4, ep=4), RING),
    (Axes(dp_replicate=2, dp_shard=2, ep=2), {}),
    (Axes(dp_shard=2, cp=2, ep=2), RING),
    (Axes(dp_shard=2, cp=2, ep=4), {}),
    (Axes(dp_shard=2, ep=2, tp=2), {}),
    (Axes(dp_replicate=2, tp=2), {}),
]


def names(cases: list[tuple[Axes, dict[str, Any]]]) -> list[str]:
    return [" ".join([str(axes), *options.values()]) for axes, options in cases]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("axes", "options"), DENSE, ids=names(DENSE))
def test_dense(eight: Pool, axes: Axes, options: dict[str, Any], schedule: str) -> None:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    world = 2 * axes.ranks_per_stage
    compare(eight, "qwen3", 2, axes, SCHEDULES[schedule], {**options, "model": heads}, world)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("axes", "options"), MIXTURE, ids=names(MIXTURE))
def test_mixture(eight: Pool, axes: Axes, options: dict[str, Any], schedule: str) -> None:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    world = 2 * axes.ranks_per_stage
    compare(eight, "mixtral", 2, axes, SCHEDULES[schedule], {**options, "model": heads}, world)
