"""One step: batches that are refused, and numbers that all ranks return."""

from __future__ import annotations

import pytest
import torch

from penstock.errors import BatchError
from support import jobs
from support.families import pipeline, ragged_batch, tiny_config, tiny_model
from support.pool import Pool
from support.reference import gradients_of, plain_step
from support.refusals import refuses


def test_a_refused_batch_costs_no_gradient() -> None:
    """0.1.0: tied weights lost what earlier steps had accumulated."""
    pipe = pipeline(tiny_model("llama", tied=True))
    pipe.step(ragged_batch())
    before = gradients_of(pipe)
    with pytest.raises(BatchError):
        pipe.step(ragged_batch(2))
    torch.testing.assert_close(gradients_of(pipe), before, rtol=0, atol=0)


def test_a_step_turns_gradients_on() -> None:
    pipe = pipeline(tiny_model("llama"))
    with torch.no_grad():
        pipe.step(ragged_batch())
    assert all(p.grad is not None for p in pipe.parameters())


def test_batches_that_cannot_be_stepped_on() -> None:
    pipe = pipeline(tiny_config("llama"))
    with refuses(BatchError, "a batch of 3 rows", "4 microbatches"):
        pipe.step(ragged_batch(3))
    with refuses(BatchError, rule="reads 'labels'"):
        pipe.step({"input_ids": ragged_batch()["input_ids"]})
    with refuses(BatchError, "a batch without a valid token"):
        pipe.step({**ragged_batch(), "labels": torch.full((8, 10), -100)})
    pipe.step(ragged_batch())  # and it goes on


def test_all_ranks_return_the_same_numbers(pool: Pool) -> None:
    answers = pool.run(3, jobs.results, "qwen2", 3, 4)
    assert answers[0] == answers[1] == answers[2]
    evaluated, loss, tokens, bubble, norm, clipped = answers[0]
    model = tiny_model("qwen2")
    expected, gradients = plain_step(model, ragged_batch())
    assert evaluated == pytest.approx(expected, rel=1e-5)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert tokens == int((ragged_batch()["labels"][:, 1:] != -100).sum())
    assert 0 < bubble < 1
    total = torch.stack([gradients[name].norm() for name, _ in model.named_parameters()]).norm()
    assert norm == pytest.approx(float(total), rel=1e-5)
    assert clipped == pytest.approx(0.5, rel=1e-4)
