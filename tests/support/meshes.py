"""A pipeline on a mesh, compared with one plain process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock import Axes
from support import jobs_mesh
from support.families import tiny_model
from support.pool import Pool
from support.reference import plain_step


def compare(
    pool: Pool, family: str, ranks: int, axes: Axes, schedule: Any, options: dict[str, Any], world: int = 4
) -> None:
    """options: AutoPipeline's, and the model's: "tied", and sizes as "model"."""
    found = pool.run(world, jobs_mesh.steps, family, ranks, axes, schedule, options)
    sizes = options.get("model", {})
    model = tiny_model(family, torch.float64, layers=4, tied=options.get("tied", False), **sizes)
    whole = jobs_mesh.batch()
    loss, expected = plain_step(model, whole)
    norm = torch.stack([expected[name].norm() for name, _ in model.named_parameters()]).norm()  # tied: once
    names = set()
    for told in found:
        assert told["worst"] < 1e-10, (told["rank"], told["where"])
        assert told["loss"] == [pytest.approx(loss, rel=1e-10)] * 2
        assert told["evaluated"] == pytest.approx(loss, rel=1e-10)
        assert told["tokens"] == int((whole["labels"][:, 1:] != -100).sum())
        assert told["norm"] == pytest.approx(2 * float(norm), rel=1e-9)
        names |= set(told["names"])
    assert names >= set(expected)
