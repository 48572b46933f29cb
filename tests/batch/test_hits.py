"""Token accuracy: hits of whole logits, of blocks and of parts are those of a plain count, ties included."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.batch import head_logits
from penstock.batch.head_logits import HeadLogits
from penstock.batch.hits import NoHits, TokenHits
from penstock.batch.logit_sums import Penalties
from penstock.batch.loss import IGNORED, NextToken, RowLabels, TokenLabels
from penstock.batch.preferences import DPO
from penstock.pipeline.steps.step import StepResult, accuracy_of
from support.families import pipeline, ragged_batch, tiny_model

ROWS, SEQUENCE, WIDTH, VOCABULARY = 4, 9, 8, 23


def plain_hits(logits: Tensor, labels: Tensor) -> int:
    """Of next tokens: those that no other token's logit exceeds, one token after the other."""
    count = 0
    for row in range(len(labels)):
        for at in range(labels.shape[1] - 1):
            label = int(labels[row, at + 1])
            count += label != IGNORED and all(value <= logits[row, at, label] for value in logits[row, at])
    return count


def drawn(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, a head with equal rows, so that logits tie, and labels of which many are hits."""
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, SEQUENCE, WIDTH, generator=random).to(dtype)
    weight = torch.randn(VOCABULARY, WIDTH, generator=random).to(dtype)
    weight[-9:] = weight[:9]
    likeliest = F.linear(hidden, weight).argmax(-1).roll(1, -1)
    labels = torch.where(
        torch.rand(ROWS, SEQUENCE, generator=random) < 0.6, likeliest, (likeliest + 14) % VOCABULARY
    )
    labels[0, 3:6] = IGNORED
    return hidden.requires_grad_(), weight.requires_grad_(), labels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("scale", [1.0, -2.0])  # the model's own arithmetic on its logits
def test_blocks_count_as_whole_logits_do(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, grad: bool, scale: float
) -> None:
    monkeypatch.setattr(head_logits, "HELD_BYTES", 4 * ROWS * (SEQUENCE - 1) * 4)  # blocks of 4 tokens
    hidden, weight, labels = drawn(dtype)
    logits = F.linear(hidden, weight)
    expected = plain_hits(logits * scale, labels)
    assert scale < 0 or expected > 10
    for made in (logits, HeadLogits(hidden, weight), HeadLogits(hidden, weight, by_liger=not grad)):
        loss = NextToken(0.1, 1e-2, accuracy=True)
        with torch.set_grad_enabled(grad):
            loss.total({"logits": made * scale}, {"labels": labels})
        assert loss.hits.take() == expected
        assert loss.hits.take() == 0


def test_counting_changes_neither_the_loss_nor_a_gradient() -> None:
    results = []
    for accuracy in (False, True):
        for kind in (F.linear, HeadLogits):
            hidden, weight, labels = drawn(torch.float32)
            total = NextToken(0.1, accuracy=accuracy).total(kind(hidden, weight), {"labels": labels})
            results.append([total, *torch.autograd.grad(total, (hidden, weight))])
    without, counted = results[:2], results[2:]
    for before, after in zip(without, counted, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize("accuracy", [False, True])
def test_whole_logits_are_not_copied_to_be_counted(monkeypatch: pytest.MonkeyPatch, accuracy: bool) -> None:
    """Rows of a slice lie apart: to flatten them copies all logits."""
    hidden, weight, labels = drawn(torch.float32)
    logits = F.linear(hidden, weight)
    shown = list[int]()
    loss = NextToken(accuracy=accuracy)
    monkeypatch.setattr(loss.hits, "add_whole", lambda logits, *_: shown.append(logits.data_ptr()))
    loss.total({"logits": logits}, {"labels": labels})
    assert shown == [logits.data_ptr()]


def test_prediction_layers_do_not_count() -> None:
    hidden, weight, labels = drawn(torch.float32)
    logits, loss = F.linear(hidden, weight), NextToken(accuracy=True)
    outputs = {"logits": logits, "mtp_logits": (logits, logits), "mtp_loss_scaling_factor": 0.1}
    loss.total(outputs, {"labels": labels})
    assert loss.hits.take() == plain_hits(logits, labels)


def test_a_microbatch_that_was_not_seen_makes_the_count_unknown_once() -> None:
    hits, ones = TokenHits(), torch.ones(2)
    hits.add(ones, ones, torch.tensor([3, IGNORED]), IGNORED)
    hits.miss()
    assert math.isnan(hits.take())
    hits.add(ones, ones, torch.tensor([3, IGNORED]), IGNORED)
    assert hits.take() == 1
    hits.add(ones, ones, torch.tensor([3, 4]), IGNORED)
    hits.reset()
    assert hits.take() == 0
    assert math.isnan(NoHits().take())


def test_liger_shows_no_logits_where_it_makes_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_logits, "liger_cross_entropy", lambda *_: torch.zeros(()))
    hidden, weight, labels = drawn(torch.float32)
    hits = TokenHits()
    HeadLogits(hidden, weight, by_liger=True).cross_entropy(labels, IGNORED, Penalties(), hits)
    assert math.isnan(hits.take())


OPTIONS: dict[str, dict[str, Any]] = {
    "1f1b": {"schedule": "1f1b"},
    "two copies": {"schedule": "dualpipe"},
    "split backward": {"schedule": "zb_v"},
    "blocks": {"schedule": "1f1b", "chunked_loss": True},
    "padded": {"schedule": "1f1b", "shapes": "padded"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_steps_and_evaluations_have_the_accuracy_of_one_process(options: dict[str, Any]) -> None:
    model, batch = tiny_model("llama"), ragged_batch()
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"]).logits
    likeliest = logits.argmax(-1).roll(1, -1)
    valid = batch["labels"] != IGNORED
    batch["labels"] = torch.where(valid & (torch.arange(10) % 3 > 0), likeliest, batch["labels"])
    expected = plain_hits(logits, batch["labels"]) / int((batch["labels"][:, 1:] != IGNORED).sum())
    assert expected > 0.3
    pipe = pipeline(model, loss_fn=NextToken(accuracy=True), **options)
    for call in (pipe.evaluate, pipe.step):
        assert call(batch).accuracy == pytest.approx(expected, rel=1e-12)


def test_a_loss_that_counts_no_hits_has_no_accuracy() -> None:
    losses: list[Callable[..., Any] | None] = [None, lambda output, microbatch: output.mean()]
    for loss in losses:
        pipe = pipeline(tiny_model("llama"), loss_fn=loss)
        assert pipe.step(ragged_batch()).accuracy is None


def test_a_step_that_failed_leaves_no_hits() -> None:
    model, batch = tiny_model("llama"), ragged_batch()
    loss = NextToken(accuracy=True)
    pipe = pipeline(model, loss_fn=loss)
    first = pipe.evaluate(batch).accuracy
    loss.total(torch.zeros(1, 3, 64), {"labels": torch.zeros(1, 3, dtype=torch.int64)})
    assert pipe.evaluate(batch).accuracy == first


def test_the_accuracy_of_several_calls_is_over_all_their_tokens() -> None:
    calls = [StepResult(1.0, 3, 0.0, accuracy=1 / 3), StepResult(1.0, 1, 0.0, accuracy=1.0)]
    assert accuracy_of(calls) == pytest.approx(0.5)
    assert accuracy_of([*calls, StepResult(0.0, 0, 0.0)]) == pytest.approx(0.5)  # a call without a label
    assert accuracy_of([*calls, StepResult(0.0, 2, 0.0)]) is None
    assert accuracy_of([StepResult(0.0, 0, 0.0)]) is None


def test_labels_of_rows_are_hits_by_class_or_by_sign() -> None:
    logits = torch.tensor([[0.5, -1.0, 2.0], [-0.5, 3.0, 0.1], [1.0, 0.0, -1.0]])
    classes = {"input_ids": torch.ones(3, 2), "labels": torch.tensor([2, 0, -100])}
    one = RowLabels(3, None, ["single_label_classification"]).counting()
    one.total(logits, classes)
    assert (one.hits.take(), one.counted_rows(classes).tolist()) == (1, [True, True, False])
    several = RowLabels(3, "multi_label_classification", ["multi_label_classification"]).counting()
    several.total(logits, {"labels": torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 1.0], [0.0, 1.0, 1.0]])})
    assert several.hits.take() == 2 + 3 + 1  # 0.0 is as near to one label as to the other
    numbers = RowLabels(3, "regression", ["regression"]).counting()
    numbers.total(logits, {"labels": logits})
    assert math.isnan(numbers.hits.take())


def test_the_rows_in_which_a_label_counts() -> None:
    labels = torch.tensor([[5, -100, -100], [-100, 5, -100], [-100, -100, -100]])
    assert NextToken().counted_rows({"labels": labels}).tolist() == [False, True, False]
    assert NextToken().counted_rows({"labels": labels, "shift_labels": labels}).tolist() == [
        True,
        True,
        False,
    ]
    assert TokenLabels(9).counted_rows({"labels": labels}).tolist() == [True, True, False]
    assert DPO().counted_rows({"labels": labels}).tolist() == [False, True, False]
