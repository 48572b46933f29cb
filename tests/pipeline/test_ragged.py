"""Any shape, exactly: ragged microbatches, packed documents and padding, with every schedule and every way of
telling shapes."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from penstock import AutoPipeline, Pipeline
from penstock.batch.padding import Padding
from penstock.errors import BatchError
from penstock.models.activation_checkpointing import Checkpointing
from support import jobs
from support.families import tiny_model
from support.pool import Pool
from support.ragged import Microbatches, apart, documents, packed, ragged
from support.reference import (
    TOLERANCE,
    Gradients,
    assert_every_gradient,
    assert_gradients,
    gradients_of,
    plain_steps,
)
from support.schedules import FORMS

SHAPES = {
    "inferred": "inferred",
    "exchanged": "exchanged",
    "padded": "padded",
    "buckets": Padding(buckets=(8, 16), multiple=4),
    "static": Padding(length=20),
}
CHECKPOINTING: dict[str, Any] = {
    "full": "full",
    "selective": "selective",
    "every second layer": Checkpointing(every=2),
    "first in flight": Checkpointing(in_flight=1),
    "per rank": Checkpointing(in_flight=(2, 0)),
    "attention kept, first in flight": Checkpointing(save=("attention",), in_flight=2),
}


def assert_step(
    pipe: Pipeline, given: Microbatches, loss: float, expected: Gradients, tolerance: float
) -> None:
    """One step's loss and every gradient of every stage, of copies too."""
    pipe.zero_grad()
    assert pipe.step(given).loss == pytest.approx(loss, rel=max(tolerance, 1e-12))
    assert_every_gradient(pipe.modules.values(), expected, tolerance)
    assert pipe.timeline.peak_live == pipe.proof.peak_live


def assert_exact(
    model: PreTrainedModel, given: Microbatches, plain: Microbatches | None = None, **options: Any
) -> None:
    tolerance = TOLERANCE[model.dtype]
    pipe = AutoPipeline(microbatches=len(given), **options).build(model)
    loss, expected = plain_steps(model, plain or given)
    assert_step(pipe, given, loss, expected, tolerance)
    other = given[::-1]  # other shapes in other places, in the same pipeline
    assert_step(pipe, other, loss, expected, tolerance)


@pytest.mark.parametrize(("form", "checkpointing"), [*zip(FORMS, CHECKPOINTING, strict=False)])
def test_checkpointing(form: str, checkpointing: str) -> None:
    model, how = tiny_model("llama", torch.float64, layers=8), CHECKPOINTING[checkpointing]
    assert_exact(model, ragged(6), ranks=2, schedule=FORMS[form], activation_checkpointing=how)


@pytest.mark.sweep
@pytest.mark.parametrize("form", FORMS)
def test_everything_in_every_schedule(form: str) -> None:
    """The full product; tests/test_every_schedule.py has its pairs in every run."""
    model, rows = tiny_model("llama", torch.float64, layers=8), documents(6)
    for shapes, how in product(SHAPES.values(), (False, *CHECKPOINTING.values())):
        options: dict[str, Any] = {"shapes": shapes, "activation_checkpointing": how}
        assert_exact(model, ragged(6), ranks=2, schedule=FORMS[form], **options)
        assert_exact(model, packed(rows), apart(rows), ranks=2, schedule=FORMS[form], **options)


def test_evaluation_leaves_a_steps_metadata_alone() -> None:
    """Each microbatch's positions go with it, and nothing uses them up between."""
    model, rows = tiny_model("llama", torch.float64), documents(4)
    pipe = AutoPipeline(ranks=2, microbatches=4).build(model)
    loss, expected = plain_steps(model, apart(rows))
    given = packed(rows)
    assert pipe.evaluate(given).loss == pytest.approx(loss, rel=1e-10)
    assert pipe.evaluate(given[:3]).tokens < pipe.evaluate(given).tokens
    assert_step(pipe, given, loss, expected, 1e-10)
    assert pipe.evaluate(given).loss == pytest.approx(loss, rel=1e-10)


def test_a_packed_batch_may_be_split_by_rows() -> None:
    """cu_seq_lens run over all rows; each microbatch gets those of its own."""
    model, rows = tiny_model("llama", torch.float64), documents(3)
    whole = {"input_ids": torch.arange(24).reshape(4, 6) + 3}
    ends = [0, 2, 6, 12, 13, 18, 20, 24]
    ids = whole["input_ids"].flatten()
    pieces = [ids[a:b] for a, b in pairwise(ends)]
    labels = [torch.cat([piece.new_full((1,), -100), piece[1:]]) for piece in pieces]
    batch = {
        **whole,
        "labels": torch.cat(labels).reshape(4, 6),
        "cu_seq_lens_q": torch.tensor(ends, dtype=torch.int32),
        "cu_seq_lens_k": torch.tensor(ends, dtype=torch.int32),
        "max_length_q": 6,
        "max_length_k": 6,
    }
    plain = [{"input_ids": piece[None], "labels": piece[None]} for piece in pieces if len(piece) > 1]
    loss, expected = plain_steps(model, plain)
    for count in (1, 2, 3, 4):
        pipe = AutoPipeline(ranks=2, microbatches=count).build(model)
        found = pipe.step(batch)
        assert found.loss == pytest.approx(loss, rel=1e-10)
        assert_gradients(
            gradients_of(pipe),
            expected,
            1e-10,
        )
    with pytest.raises(BatchError, match="2 microbatches"):
        pipe.step(packed(rows)[:2])


@pytest.mark.parametrize(
    ("turn", "ranks", "shapes"), [(0, 2, "exchanged"), (1, 2, "buckets"), (2, 4, "inferred")]
)
def test_gloo(pool: Pool, turn: int, ranks: int, shapes: str) -> None:
    """Each schedule meets each kind of batch and each way to learn shapes once; the sweep has the product."""
    forms = [FORMS[form] for form in ("1f1b", "interleaved_zero_bubble", "zb_v", "dualpipe")]
    wrong = pool.run(ranks, jobs.any_shape, ranks, forms, SHAPES[shapes], 2 * ranks, turn)
    assert [line for rank in wrong for line in rank] == []


@pytest.mark.sweep
@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_gloo_everything(pool: Pool, ranks: int, shapes: str) -> None:
    forms = [FORMS[form] for form in FORMS if "searched" not in form]
    wrong = pool.run(ranks, jobs.any_shape, ranks, forms, SHAPES[shapes], 4 * ranks)
    assert [line for rank in wrong for line in rank] == []
