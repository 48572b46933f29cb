"""The parts of every step: autocast, seeds and weights that are others than before."""

from __future__ import annotations

import pytest
import torch

from penstock import AutoPipeline
from penstock.batch.loss import NextToken
from penstock.pipeline.compare import whole_backward
from penstock.pipeline.steps.run_parts import Seeds
from support.families import pipeline, ragged_batch, tiny_model
from support.reference import assert_gradients, gradients_of, plain_step


def test_verify_against_leaves_dropout_out() -> None:
    model = tiny_model("gpt2", resid_pdrop=0.5)
    pipeline(model).verify_against(model, ragged_batch())
    assert model.training


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
def test_autocast(schedule: str) -> None:
    """Rounded as one process rounds that takes the same microbatches."""
    model, batch = tiny_model("llama"), ragged_batch()
    pipe = pipeline(model, schedule=schedule)
    with torch.autocast("cpu", torch.bfloat16):
        found = pipe.step(batch).loss
        expected = whole_backward(model, pipe.microbatches(batch), NextToken())
    assert found == pytest.approx(expected, rel=1e-6)
    assert_gradients(gradients_of(pipe), gradients_of(model), 1e-2)  # one rounding of bfloat16
    assert found != pytest.approx(plain_step(model, batch)[0], rel=1e-7)  # it was on


def test_a_pipeline_closes_the_parts_of_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[Seeds] = []
    monkeypatch.setattr(Seeds, "close", lambda part: closed.append(part))
    pipe = AutoPipeline(ranks=2, microbatches=2).build(tiny_model("llama"))
    assert not closed
    pipe.close()
    assert len(closed) == 1
