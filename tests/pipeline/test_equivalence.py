"""The promise: every schedule, every split, every family gives the gradients of one plain process."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock import AutoPipeline
from support import jobs
from support.covering import every, pairs
from support.families import FAMILIES, ragged_batch, tiny_model
from support.pool import Pool
from support.reference import assert_every_gradient, assert_gradients, gradients_of, plain_step

ALL = list(product(("gpipe", "1f1b"), range(1, 9)))
# in the sweep every pair of these, and their product in `test_gloo_everything`
GLOO = pairs({
    "ranks": (2, 3, 4), "schedule": ("gpipe", "1f1b"), "microbatches": (1, 2, 5, 8), "tied": (True, False)
})  # fmt: skip


# the other three in the sweep
@pytest.mark.parametrize(
    ("ranks", "tied"), every(2, [(2, True), (2, False), (3, False), (3, True), (4, True), (4, False)])
)
def test_gloo_all_sizes(pool: Pool, ranks: int, tied: bool) -> None:
    rows = [row for row in GLOO if row["ranks"] == ranks and row["tied"] == tied]
    cases = [(row["schedule"], row["microbatches"]) for row in rows]
    pool.run(ranks, jobs.equivalence, "llama", tied, ranks, cases)


@pytest.mark.parametrize(
    ("family", "ranks", "schedule"),
    every(3, [("mixtral", 2, "1f1b"), ("gpt2", 4, "gpipe"), ("gemma3_text", 4, "1f1b")]),
)
def test_gloo_families(pool: Pool, family: str, ranks: int, schedule: str) -> None:
    """All families in one process are in test_every_schedule."""
    pool.run(ranks, jobs.equivalence, family, family == "gpt2", ranks, [(schedule, 3)])


@pytest.mark.sweep
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gloo_everything(pool: Pool, family: str, tied: bool) -> None:
    """The whole product over real processes; minutes long, so it has a target of its own."""
    for ranks in (2, 3, 4):
        pool.run(ranks, jobs.equivalence, family, tied, ranks, ALL)


def assert_exact(family: str, batch: dict[str, Tensor], **options: Any) -> None:
    model = tiny_model(family)
    loss, expected = plain_step(model, batch)
    pipe = AutoPipeline(**options).build(model)
    assert pipe.step(batch).loss == pytest.approx(loss, rel=1e-5)
    assert_every_gradient(pipe.modules.values(), expected, 1e-5)


def test_padding_mask_and_positions_reach_every_stage() -> None:
    batch = ragged_batch(6, 12)
    batch["attention_mask"] = torch.ones(6, 12, dtype=torch.long)
    batch["attention_mask"][1, :5] = 0  # padded on the left
    batch["labels"][1, :6] = -100
    batch["position_ids"] = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    assert_exact("llama", batch, ranks=4, microbatches=4)


def test_packed_positions_keep_documents_apart() -> None:
    batch = ragged_batch(4, 12)
    batch["position_ids"] = torch.cat([torch.arange(5), torch.arange(7)]).expand(4, 12)
    assert_exact("qwen3", batch, ranks=3, microbatches=2)


def test_another_shape_in_the_next_step(pool: Pool) -> None:
    pool.run(3, jobs.shapes, 3)


def test_frozen_parts() -> None:
    """Frozen weights get no gradient; what lies before them still does."""
    model, batch = tiny_model("llama", torch.float64), ragged_batch()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1." in name or "lm_head" in name)
    expected = plain_step(model, batch)[1]
    pipe = AutoPipeline(ranks=4, microbatches=3).build(model)
    pipe.step(batch)
    found = gradients_of(pipe)
    assert found.keys() == expected.keys()
    assert_gradients(found, expected, 1e-10)
