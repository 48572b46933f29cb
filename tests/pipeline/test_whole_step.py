"""A loss of all rows of a step at once: gradients are those of one plain process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock import AutoPipeline
from penstock.errors import BatchError, ConfigError, ModelError
from penstock.pipeline import WholeStepLoss
from support import heads
from support.reference import assert_gradients, gradients_of
from support.refusals import refuses

ROWS = 8


def contrastive(vectors: Tensor) -> Tensor:
    """Rows 0 and 1, 2 and 3, ... belong together; the other rows of the step are negatives."""
    vectors = F.normalize(vectors, dim=1)
    scores = (vectors[::2] @ vectors[1::2].T) / 0.1
    return F.cross_entropy(scores, torch.arange(len(scores)))


def batch() -> dict[str, Tensor]:
    ids = heads.tokens(ROWS)
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


@pytest.mark.parametrize(("name", "model_type", "schedule"), [
    ("BertForSequenceClassification", "bert", "1f1b"),
    ("LlamaForSequenceClassification", "llama", "zb_v"),
])  # fmt: skip
def test_gradients_are_those_of_one_process(name: str, model_type: str, schedule: str) -> None:
    model, whole = heads.tiny(name, model_type), batch()
    expected = contrastive(model(**whole, use_cache=False).logits)
    torch.autograd.backward(expected)
    loss = WholeStepLoss(contrastive)
    pipe = AutoPipeline(ranks=2, microbatches=4, schedule=schedule, loss_fn=loss).build(model)
    uneven = [{key: value[rows] for key, value in whole.items()}
              for rows in (slice(0, 1), slice(1, 6), slice(6, 8))]  # fmt: skip
    for given in (whole, uneven):
        pipe.zero_grad()
        result = loss.step(pipe, given)
        assert result.loss == pytest.approx(float(expected.detach()), rel=1e-10)
        assert result.tokens == ROWS
        assert_gradients(gradients_of(pipe), gradients_of(model), 1e-10)


class WithAccuracy:
    """A loss of groups of two rows, with an accuracy."""

    rows_per_group = 2

    def __call__(self, vectors: Tensor) -> Tensor:
        return contrastive(vectors)

    def accuracy(self, vectors: Tensor) -> float:
        return float(len(vectors))


def test_an_evaluation_has_the_loss_of_all_rows_and_its_accuracy() -> None:
    model = heads.tiny("BertForSequenceClassification", "bert")
    expected = float(contrastive(model(**batch()).logits).detach())
    loss = WholeStepLoss(WithAccuracy())
    pipe = AutoPipeline(ranks=2, microbatches=4, loss_fn=loss).build(model)
    evaluated = loss.evaluate(pipe, batch())
    assert evaluated.loss == pytest.approx(expected, rel=1e-10)
    assert (evaluated.tokens, evaluated.accuracy, loss.step(pipe, batch()).accuracy) == (ROWS, ROWS, ROWS)
    assert WholeStepLoss(contrastive).rows_per_group == 1
    with refuses(BatchError, "microbatch 0"):
        loss.step(pipe, [{name: value[:3] for name, value in batch().items()}])


def test_the_optimizer_steps_as_in_one_process() -> None:
    model, loss = heads.tiny("BertForSequenceClassification", "bert"), WholeStepLoss(contrastive)
    pipe = AutoPipeline(ranks=2, microbatches=4, loss_fn=loss).build(model)
    torch.autograd.backward(contrastive(model(**batch()).logits))
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    result = loss.step(pipe, batch(), optimizer=torch.optim.SGD(pipe.parameters(), lr=0.1), max_norm=0.5)
    assert result.norm == pytest.approx(float(norm), rel=1e-10)
    trained: Any = dict(model.named_parameters())
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter, trained[name], rtol=1e-9, atol=1e-12)


def test_what_would_not_be_exact_is_refused() -> None:
    model, loss = heads.tiny("BertForSequenceClassification", "bert"), WholeStepLoss(contrastive)
    pipe = AutoPipeline(ranks=2, microbatches=2, loss_fn=loss).build(model)
    with refuses(ConfigError, "WholeStepLoss in pipe.step(batch)", "the whole step", "loss.step"):
        pipe.step(batch())
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.1
    pipe = AutoPipeline(ranks=2, microbatches=2, loss_fn=loss).build(model)
    with refuses(ModelError, "WholeStepLoss with dropout", "would draw other values"):
        loss.step(pipe, batch())
