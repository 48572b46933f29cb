"""Large logits are never whole, whatever the model does to them: gradients as in one plain process."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from penstock import AutoPipeline
from penstock.batch import head_logits
from penstock.batch.head_logits import HeadLogits
from penstock.batch.loss import NextToken
from support.covering import every
from support.families import pipeline, ragged_batch, tiny_model
from support.reference import TOLERANCE, assert_every_gradient, plain_step

# a tied head; a soft cap; a divided and a multiplied scale; a head with a bias
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tied": True},
    "gemma2": {"final_logit_softcapping": 2.0},
    "granite": {},
    "cohere2": {"logit_scale": 0.25},
    "gpt_neox": {},
}
HOW: dict[str, dict[str, Any]] = {
    "1f1b": {"schedule": "1f1b"},
    "split": {"schedule": "zb_h1"},
    "v and checkpointing": {"schedule": "zb_v", "activation_checkpointing": True},
    "dualpipe_v": {"schedule": "dualpipe_v"},
}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of a microbatch of 2 x 10 tokens are large, and go in blocks of 13 of 64 tokens."""
    monkeypatch.setattr(head_logits, "HELD_BYTES", 4 * 2 * 10 * 13)


@pytest.fixture
def _never_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HeadLogits, "whole", lambda self: pytest.fail("whole logits"))


@pytest.mark.usefixtures("_never_whole")
@pytest.mark.parametrize(("family", "how"), every(7, product(FAMILIES, HOW)))
def test_gradients_are_those_of_one_process(family: str, how: str) -> None:
    model = tiny_model(family, torch.float64, **FAMILIES[family])
    pipe, batch = pipeline(model, **HOW[how]), ragged_batch()
    loss, expected = plain_step(model, batch)
    for _ in range(2):  # the first one measures
        result = pipe.step(batch)
        tolerance = TOLERANCE[torch.float32 if family in ("gemma2", "cohere2") else torch.float64]
        assert result.loss == pytest.approx(loss, rel=tolerance)
        assert_every_gradient(pipe.modules.values(), expected, tolerance)
        pipe.zero_grad()
    assert pipe.evaluate(batch).loss == pytest.approx(loss, rel=tolerance)
    pipe.close()


def test_a_hook_that_reads_the_logits_sees_them() -> None:
    model, seen = tiny_model("llama", torch.float64), []
    pipe, batch = pipeline(model), ragged_batch()
    head = pipe.modules[1].get_submodule("lm_head")
    assert isinstance(head, nn.Linear)
    head.register_forward_hook(lambda module, args, output: seen.append(output.detach().sum()))
    loss, expected = plain_step(model, batch)
    assert pipe.step(batch).loss == pytest.approx(loss, rel=1e-10)
    assert_every_gradient(pipe.modules.values(), expected, 1e-10)
    with torch.no_grad():
        logits = model(batch["input_ids"]).logits
    assert sum(map(float, seen)) == pytest.approx(float(logits.sum()))


def test_outputs_are_plain_tensors() -> None:
    model, batch = tiny_model("llama", torch.float64), ragged_batch()
    found = pipeline(model).evaluate(batch, lambda output, number: output).outputs
    expected = model(batch["input_ids"]).logits.detach()
    torch.testing.assert_close(torch.cat(list(found)), expected)


@pytest.mark.parametrize(
    "options", [{"chunked_loss": False}, {"loss_fn": lambda output, batch: output.sum()}]
)
def test_it_can_be_left_out(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HeadLogits, "__new__", lambda *args: pytest.fail("deferred"))
    pipeline(tiny_model("llama"), **options).step(ragged_batch())


def test_smoothing_and_z_loss_are_those_of_whole_logits() -> None:
    model, batch, found = tiny_model("llama", torch.float64), ragged_batch(), []
    for chunked in (True, False):
        pipe = pipeline(model, loss_fn=NextToken(label_smoothing=0.1, z_loss=1e-3), chunked_loss=chunked)
        loss = pipe.step(batch).loss
        found.append([torch.tensor(loss, dtype=torch.float64), *(p.grad for p in pipe.parameters())])
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)
    assert pipeline(model).step(batch).loss != pytest.approx(loss)


def test_the_last_stage_holds_no_logits_as_predicted() -> None:
    model, batch, found = tiny_model("llama"), ragged_batch(), []
    for chunked in (True, False):
        auto = AutoPipeline(ranks=2, microbatches=4, chunked_loss=chunked)
        predicted = auto.memory_costs(auto.build_plan(model), (2, 10))
        assert predicted is not None
        pipe = auto.build(model)
        pipe.step(batch)
        held, expected = pipe.costs().activation, predicted.activation
        assert isinstance(expected, list)
        # of the loss a scalar is held for the step's report
        assert held == [[expected[0]] * 4, [expected[1] + 4] * 4]
        found.append(expected[1])
    chunked_bytes, whole_bytes = found
    assert whole_bytes - chunked_bytes > 4 * 2 * 9 * 64  # the saved log-softmax of 2 rows of 9 tokens
