"""The promise: every schedule, every split, every family gives the gradients of one plain process."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from penstock import AutoPipeline, Pipeline
from support import jobs
from support.covering import pairs
from support.families import FAMILIES, ragged_batch, tiny_model
from support.pool import Pool
from support.reference import assert_gradients, gradients_of, plain_step

ALL = list(product(("gpipe", "1f1b"), range(1, 9)))


def step_gradients(pipe: Pipeline, batch: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients, after making sure that every parameter has one and nothing is left behind."""
    result = pipe.step(batch)
    gradients = gradients_of(pipe)
    assert len(gradients) == len(dict(pipe.named_parameters(remove_duplicate=False)))
    assert pipe.timeline.peak_live == pipe.proof.peak_live
    return result.loss, gradients


def assert_equal(model: PreTrainedModel, pipe: Pipeline, batch: dict[str, Tensor], tolerance: float) -> None:
    loss, expected = plain_step(model, batch)
    found, gradients = step_gradients(pipe, batch)
    assert found == pytest.approx(loss, rel=max(tolerance, 1e-12))
    assert_gradients(gradients, expected, tolerance)


# every pair of these; `test_gloo_everything` has the product
GLOO = pairs(
    {"ranks": (2, 3, 4), "schedule": ("gpipe", "1f1b"), "microbatches": range(1, 9), "tied": (True, False)}
)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_gloo_all_sizes(pool: Pool, ranks: int, tied: bool) -> None:
    rows = [row for row in GLOO if row["ranks"] == ranks and row["tied"] == tied]
    cases = [(row["schedule"], row["microbatches"]) for row in rows]
    wrong = pool.run(ranks, jobs.equivalence, "llama", tied, ranks, cases)
    assert [line for rank in wrong for line in rank] == []


@pytest.mark.parametrize(("turn", "family"), [*enumerate(name for name in FAMILIES if name != "llama")])
def test_gloo_families(pool: Pool, turn: int, family: str) -> None:
    """Two or four ranks in turn; all families in all sizes in one process are in test_every_schedule."""
    ranks, schedule = (2, "1f1b") if turn % 2 else (4, "gpipe" if turn % 4 else "1f1b")
    wrong = pool.run(ranks, jobs.equivalence, family, turn % 3 == 0, ranks, [(schedule, 3)])
    assert [line for rank in wrong for line in rank] == []


@pytest.mark.sweep
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gloo_everything(pool: Pool, family: str, tied: bool) -> None:
    """The whole product over real processes; minutes long, so it has a target of its own."""
    wrong = []
    for ranks in (2, 3, 4):
        for lines in pool.run(ranks, jobs.equivalence, family, tied, ranks, ALL):
            wrong += lines
    assert wrong == []


def test_padding_mask_and_positions_reach_every_stage() -> None:
    model, batch = tiny_model("llama"), ragged_batch(6, 12)
    batch["attention_mask"] = torch.ones(6, 12, dtype=torch.long)
    batch["attention_mask"][1, :5] = 0  # padded on the left
    batch["labels"][1, :6] = -100
    batch["position_ids"] = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    for ranks in (1, 2, 4):
        assert_equal(model, AutoPipeline(ranks=ranks, microbatches=4).build(model), batch, 1e-5)


def test_packed_positions_keep_documents_apart() -> None:
    model, batch = tiny_model("qwen3"), ragged_batch(4, 12)
    batch["position_ids"] = torch.cat([torch.arange(5), torch.arange(7)]).expand(4, 12)
    assert_equal(model, AutoPipeline(ranks=3, microbatches=2).build(model), batch, 1e-5)


def test_another_shape_in_the_next_step() -> None:
    model = tiny_model("gemma2")
    pipe = AutoPipeline(ranks=3, microbatches=4).build(model)
    for rows, length in ((8, 10), (5, 7), (9, 16), (8, 10)):
        pipe.zero_grad()
        assert_equal(model, pipe, ragged_batch(rows, length), 1e-5)


def test_gloo_another_shape_in_the_next_step(pool: Pool) -> None:
    assert pool.run(3, jobs.shapes, 3) == [[]] * 3


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_activation_checkpointing(family: str) -> None:
    model, batch = tiny_model(family), ragged_batch()
    pipe = AutoPipeline(ranks=2, microbatches=4, activation_checkpointing=True).build(model)
    assert_equal(model, pipe, batch, 1e-5)


def test_bfloat16() -> None:
    model, batch = tiny_model("qwen3", torch.bfloat16), ragged_batch()
    pipe = AutoPipeline(ranks=2, microbatches=4).build(model)
    pipe.verify_against(model, batch)
    _, expected = plain_step(tiny_model("qwen3"), batch)
    pipe.step(batch)
    for name, parameter in pipe.named_parameters(remove_duplicate=False):
        assert parameter.grad is not None
        error = float((parameter.grad.float() - expected[name]).norm() / expected[name].norm())
        assert error < 0.1, name


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
