"""A pipeline beside each other axis, and beside two of them: loss and every gradient of one process."""

from __future__ import annotations

from typing import Any

import pytest

from penstock import Axes
from support.meshes import compare
from support.pool import Pool

ULYSSES, RING = {"context": "ulysses"}, {"context": "ring"}
# family, ranks of the pipeline, axes, schedule, options
CASES: list[tuple[str, int, Axes, Any, dict[str, Any]]] = [
    ("qwen3", 2, Axes(tp=2), "1f1b", {}),
    ("mixtral", 1, Axes(dp_shard=2, cp=2, ep=4), "1f1b", ULYSSES),
    ("llama", 2, Axes(cp=2), "1f1b", ULYSSES),
    ("mistral", 2, Axes(cp=2), "zb_v", RING),
    ("mixtral", 2, Axes(dp_shard=2, ep=2), "1f1b", {}),
    ("mixtral", 2, Axes(dp_shard=2, ep=2), "dualpipe_v", {}),
    ("llama", 1, Axes(cp=2, tp=2), "1f1b", RING),
    ("llama", 1, Axes(dp_shard=2, tp=2), "1f1b", {}),
    ("llama", 2, Axes(tp=2), "zb_v", {}),
    ("mixtral", 1, Axes(dp_shard=4, ep=2), "1f1b", {}),
    ("mixtral", 1, Axes(dp_replicate=2, dp_shard=2, ep=2), "1f1b", {}),
]


@pytest.mark.parametrize(("family", "ranks", "axes", "schedule", "options"), CASES[:5])
def test_as_one_process(
    pool: Pool, family: str, ranks: int, axes: Axes, schedule: Any, options: dict[str, Any]
) -> None:
    compare(pool, family, ranks, axes, schedule, options)


@pytest.mark.parallel
@pytest.mark.parametrize(("family", "ranks", "axes", "schedule", "options"), CASES[5:])
def test_more_axes(
    pool: Pool, family: str, ranks: int, axes: Axes, schedule: Any, options: dict[str, Any]
) -> None:
    compare(pool, family, ranks, axes, schedule, options)


@pytest.mark.parallel
def test_a_tied_head_over_tp(pool: Pool) -> None:
    compare(pool, "llama", 2, Axes(tp=2), "1f1b", {"tied": True})
