"""Layers compiled by the caller beside every other axis: exact, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from penstock import Axes
from support import jobs_axes as jobs
from support.pool import Pool

CASES: list[tuple[str, Axes, dict[str, Any]]] = [
    ("llama", Axes(dp_shard=2), {}),
    ("llama", Axes(tp=2), {}),
]
MORE: list[tuple[str, Axes, dict[str, Any]]] = [
    ("llama", Axes(cp=2), {"context": "ulysses"}),
    ("llama", Axes(cp=2), {"context": "ring"}),
    ("mixtral", Axes(dp_shard=2, ep=2), {}),
    ("llama", Axes(tp=2), {"sequence_parallel": True}),
]


def check(pool: Pool, family: str, axes: Axes, options: dict[str, Any]) -> None:
    for words, worst in pool.run(4, jobs.compiled, family, 2, axes, options):
        assert words == "exact"
        assert worst < 1e-10


@pytest.mark.parallel
@pytest.mark.parametrize(("family", "axes", "options"), CASES)
def test_compiled_layers_are_exact(pool: Pool, family: str, axes: Axes, options: dict[str, Any]) -> None:
    check(pool, family, axes, options)


@pytest.mark.parallel
@pytest.mark.parametrize(("family", "axes", "options"), MORE)
def test_compiled_layers_beside_other_axes(
    pool: Pool, family: str, axes: Axes, options: dict[str, Any]
) -> None:
    check(pool, family, axes, options)
