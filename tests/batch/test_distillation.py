"""Distillation: TRL's divergence in one process, over any split; a teacher over stages; what is refused."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock import AutoPipeline
from penstock.batch.distillation import Distillation
from penstock.errors import BatchError, ConfigError, ModelError
from support.families import tiny_model
from support.pairs import pair_batch, plain_gradients
from support.reference import assert_gradients, gradients_of
from support.refusals import refuses

BATCH = pair_batch(3)


def teacher_logits() -> Tensor:
    torch.manual_seed(3)
    return 3 * torch.randn(6, 10, 64, dtype=torch.float64)


def logits_of(model: Any) -> Tensor:
    logits: Tensor = model(input_ids=BATCH["input_ids"], use_cache=False).logits
    return logits


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed")
@pytest.mark.parametrize(("divergence", "beta"), [("forward", 0), ("reverse", 1)])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_every_gradient_is_that_of_trls_divergence(
    divergence: Any, beta: int, microbatches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")  # else the import is a warning, and so an error
    from trl.experimental.gkd import GKDTrainer

    model, teacher = tiny_model("llama", torch.float64), teacher_logits()

    def formula() -> Tensor:
        both, labels = (logits_of(model)[:, :-1], teacher[:, :-1]), BATCH["labels"][:, 1:]
        count = (labels != -100).sum()
        apart: Tensor = GKDTrainer.generalized_jsd_loss(
            *both, labels, beta=beta, temperature=2.0, num_items_in_batch=count
        )
        return 0.75 * apart + 0.25 * F.cross_entropy(both[0].flatten(0, 1), labels.flatten())

    expected, gradients = plain_gradients(model, formula)
    loss = Distillation(divergence, temperature=2.0, mix=0.25)
    pipe = AutoPipeline(ranks=2, microbatches=microbatches, loss_fn=loss).build(model)
    step = pipe.step(BATCH, teacher_logits=teacher)
    assert step.loss == pytest.approx(expected, rel=1e-10)
    assert step.tokens == int((BATCH["labels"][:, 1:] != -100).sum())
    assert_gradients(gradients_of(pipe), gradients, 1e-9)


@pytest.mark.parametrize("k", [64, 5])
def test_the_largest_logits_stand_for_all(k: int) -> None:
    """With all tokens, in any order, the loss is that of whole logits; with five, that of these alone."""
    model, (largest, tokens) = tiny_model("llama", torch.float64), teacher_logits().topk(k)
    hidden = torch.full((6, 10, 64), -torch.inf, dtype=torch.float64).scatter(2, tokens, largest)

    def formula() -> Tensor:
        p, q = hidden[:, :-1].softmax(-1), logits_of(model)[:, :-1].log_softmax(-1)
        apart = (torch.xlogy(p, p) - p * q).sum(-1)
        return apart[BATCH["labels"][:, 1:] != -100].mean()

    expected, gradients = plain_gradients(model, formula)
    pipe = AutoPipeline(ranks=2, microbatches=3, loss_fn=Distillation()).build(model)
    step = pipe.step(BATCH, teacher_logits=largest, teacher_tokens=tokens)
    assert step.loss == pytest.approx(expected, rel=1e-10)
    assert_gradients(gradients_of(pipe), gradients, 1e-9)


def test_a_teacher_may_run_over_stages_too() -> None:
    """Of the student's own weights, the divergence is 0 and so is every gradient."""
    model = tiny_model("llama", torch.float64)
    teacher = AutoPipeline(ranks=2, microbatches=2).build(model)
    logits = teacher.evaluate(BATCH, outputs=True, everywhere=True).outputs
    torch.testing.assert_close(logits, logits_of(model).detach(), rtol=1e-10, atol=1e-12)
    pipe = AutoPipeline(ranks=2, microbatches=3, loss_fn=Distillation("reverse")).build(model)
    assert pipe.step(BATCH, teacher_logits=logits).loss == pytest.approx(0, abs=1e-12)
    assert max(float(gradient.abs().max()) for gradient in gradients_of(pipe).values()) < 1e-10


def changed(**entries: Any) -> dict[str, Any]:
    batch = {**BATCH, "teacher_logits": torch.zeros(6, 10, 8), **entries}
    return {name: value for name, value in batch.items() if value is not None}


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "no teacher": ({"teacher_logits": None}, "a batch of", "Distillation reads 'teacher_logits'"),
    "too short": ({"teacher_logits": torch.zeros(6, 9, 8)}, "given as [6, 9, 8]", "floats of [6, 10]"),
    "a list": ({"teacher_logits": [0.0]}, "given as list", "floats of [6, 10]"),
    "other tokens": ({"teacher_tokens": torch.zeros(6, 10, 3).long()}, "[6, 10, 3]", "ids of teacher_logits"),
    "floats": ({"teacher_tokens": torch.zeros(6, 10, 8)}, "torch.float32", "whole numbers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_entries_that_do_not_fit_are_refused(name: str) -> None:
    entries, *said = REFUSED[name]
    assert Distillation().weight(changed()) == int((BATCH["labels"] != -100).sum())
    with refuses(BatchError, *said):
        Distillation().weight(changed(**entries))


def test_what_has_no_meaning_is_refused() -> None:
    for options, said in (
        ({"divergence": "both"}, "divergence='both'"),
        ({"temperature": 0}, "temperature=0"),
        ({"mix": 2}, "mix=2"),
    ):
        with refuses(ConfigError, said):
            Distillation(**options)
    with refuses(BatchError, "teacher_tokens with divergence='reverse'"):
        Distillation("reverse").weight(changed(teacher_tokens=torch.zeros(6, 10, 8).long()))
    with refuses(ModelError, "teacher_logits of 8 tokens, and a student of 64"):
        Distillation().total(torch.zeros(6, 10, 64), changed())
