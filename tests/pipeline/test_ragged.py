"""Ragged microbatches and packed documents; test_every_schedule.py has them in all schedules."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from penstock import AutoPipeline
from penstock.batch.packing import boundaries
from penstock.batch.padding import Padding
from penstock.errors import BatchError
from penstock.models.activation_checkpointing import Checkpointing
from support import jobs
from support.covering import every
from support.families import tiny_model
from support.pool import Pool
from support.ragged import apart, documents, packed, ragged
from support.reference import assert_gradients, gradients_of, plain_steps
from support.refusals import refuses
from support.schedules import FORMS

SHAPES = {
    "inferred": "inferred",
    "exchanged": "exchanged",
    "padded": "padded",
    "buckets": Padding(buckets=(8, 16), multiple=4),
    "static": Padding(length=20),
}


def test_each_rank_may_recompute_another_number_of_microbatches() -> None:
    model, microbatches = tiny_model("llama", torch.float64), ragged(6)
    loss, expected = plain_steps(model, microbatches)
    how = Checkpointing(in_flight=(2, 0))
    pipe = AutoPipeline(ranks=2, microbatches=6, activation_checkpointing=how).build(model)
    assert pipe.step(microbatches).loss == pytest.approx(loss, rel=1e-10)
    assert_gradients(gradients_of(pipe), expected, 1e-10)


def test_evaluation_leaves_a_steps_metadata_alone() -> None:
    model, rows = tiny_model("llama", torch.float64), documents(4)
    pipe = AutoPipeline(ranks=2, microbatches=4).build(model)
    loss, expected = plain_steps(model, apart(rows))
    given = packed(rows)
    assert pipe.evaluate(given).loss == pytest.approx(loss, rel=1e-10)
    assert pipe.evaluate(given[:3]).tokens < pipe.evaluate(given).tokens
    assert pipe.step(given).loss == pytest.approx(loss, rel=1e-10)
    assert_gradients(gradients_of(pipe), expected, 1e-10)
    assert pipe.evaluate(given).loss == pytest.approx(loss, rel=1e-10)


def test_a_packed_batch_may_be_split_by_rows() -> None:
    """cu_seq_lens run over all rows; each microbatch gets those of its own."""
    model = tiny_model("llama", torch.float64)
    whole = {"input_ids": torch.arange(24).reshape(4, 6) + 3}
    ends = torch.tensor([0, 2, 6, 12, 13, 18, 20, 24], dtype=torch.int32)
    pieces = [whole["input_ids"].flatten()[a:b] for a, b in pairwise(ends)]
    labels = [torch.cat([piece.new_full((1,), -100), piece[1:]]) for piece in pieces]
    batch = {
        **whole,
        "labels": torch.cat(labels).reshape(4, 6),
        **boundaries(ends),
    }
    plain = [{"input_ids": piece[None], "labels": piece[None]} for piece in pieces if len(piece) > 1]
    loss, expected = plain_steps(model, plain)
    for count in (1, 2, 3, 4):
        pipe = AutoPipeline(ranks=2, microbatches=count).build(model)
        assert pipe.step(batch).loss == pytest.approx(loss, rel=1e-10)
        assert_gradients(gradients_of(pipe), expected, 1e-10)
    with refuses(BatchError, "a batch of 4 rows"):
        pipe.step(batch, microbatches=5)


@pytest.mark.parametrize(
    ("turn", "ranks", "shapes"), every(3, [(0, 2, "exchanged"), (2, 4, "inferred"), (1, 2, "buckets")])
)
def test_over_processes(pool: Pool, turn: int, ranks: int, shapes: str) -> None:
    """Each schedule meets each kind of batch and each way to learn shapes once; the sweep has the product."""
    forms = [FORMS[form] for form in ("1f1b", "interleaved_zero_bubble", "zb_v", "dualpipe")]
    pool.run(ranks, jobs.any_shape, ranks, forms, SHAPES[shapes], 2 * ranks, turn)


@pytest.mark.sweep
@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_everything_over_processes(pool: Pool, ranks: int, shapes: str) -> None:
    forms = [FORMS[form] for form in FORMS if "searched" not in form]
    pool.run(ranks, jobs.any_shape, ranks, forms, SHAPES[shapes], 4 * ranks)
