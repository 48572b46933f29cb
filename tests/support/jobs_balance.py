"""Pipelines of mixtures whose routers' loss is asked for, beside other axes, run by the pool's workers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from penstock import AutoPipeline, Axes
from support.jobs_expert import mixture
from support.jobs_mesh import batch, full, own_part
from support.reference import Gradients

COEFFICIENT = 0.001  # the models sum their routers' loss in float32, whatever the dtype
MICROBATCHES = 2
Step = tuple[float, Gradients]


def routed(model_type: str) -> PreTrainedModel:
    """Asks for its routers' loss, whose part in their gradients is not a rounding."""
    model = mixture(model_type, torch.float64, layers=2, output_router_logits=True)
    vars(model)["router_aux_loss_coef"] = COEFFICIENT
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith((".gate.weight", ".router.weight")):  # so that pieces are used unlike each other
                parameter *= 10
    return model


def given(how: str) -> dict[str, Tensor]:
    """odd: a length that pieces do not divide; masked: rows with padding of the caller's own beside"""
    whole = batch(length=13)
    if how == "masked":
        mask = torch.ones_like(whole["input_ids"])
        for row in range(len(mask)):
            mask[row, 13 - row :] = 0
        whole["labels"] = whole["labels"].masked_fill(mask == 0, -100)
        whole["labels"][0, 1] = 5
        whole["attention_mask"] = mask
    return whole


def plain(model: PreTrainedModel, whole: dict[str, Tensor], parts: int) -> Step:
    """One process, on the microbatches that `parts` pipelines make of it."""
    count = parts * MICROBATCHES
    cut = [{name: value.chunk(count)[at] for name, value in whole.items()} for at in range(count)]
    return one_by_one(model, cut)


def one_by_one(model: PreTrainedModel, microbatches: list[dict[str, Tensor]]) -> Step:
    """One process, microbatch by microbatch: the routers' loss is each one's own."""
    items = sum(int((part["labels"][:, 1:] != -100).sum()) for part in microbatches)
    loss = 0.0
    for part in microbatches:
        inputs = {name: value for name, value in part.items() if name != "labels"}
        labels = part["labels"][:, 1:].flatten()
        output = model(**inputs, use_cache=False)
        total = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels, reduction="sum")
        total = total + COEFFICIENT * output.aux_loss * int((labels != -100).sum())
        (total / items).backward()
        loss += float(total.detach()) / items
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss, found


def steps(cases: list[tuple[str, int, Axes, Any, str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Of each case (model type, ranks, axes, schedule, batch, options) how far loss and gradients are off."""
    torch.set_num_threads(1)
    found = []
    for model_type, ranks, axes, schedule, how, options in cases:
        model, whole = routed(model_type), given(how)
        pipe = AutoPipeline(
            ranks=ranks, schedule=schedule, microbatches=MICROBATCHES, timeout=30, axes=axes, **options
        ).build(model)
        expected_loss, expected = plain(model, whole, pipe.batch_part[1])
        mine = own_part(whole, *pipe.batch_part)
        evaluated = pipe.evaluate(mine).loss
        loss = pipe.step(mine).loss
        worst = {}
        for name, p in pipe.named_parameters():
            assert (p.grad is not None) == (name in expected), name
            if p.grad is None:  # a router's correction
                continue
            difference = float((full(p.grad) - expected[name]).abs().max())
            worst[name] = difference / max(float(expected[name].abs().max()), 1e-300)
        outputs = pipe.evaluate(mine, outputs=True, everywhere=True).outputs
        told = [float(output["auxiliary_loss"]) for output in outputs]
        own = [{name: value.chunk(MICROBATCHES)[at] for name, value in mine.items() if name != "labels"}
               for at in range(MICROBATCHES)]  # fmt: skip
        losses = [COEFFICIENT * float(model(**part, use_cache=False).aux_loss) for part in own]
        pipe.close()
        found.append(
            {
                "loss": loss,
                "evaluated": evaluated,
                "expected": expected_loss,
                "outputs": told,
                "auxiliary": losses,
                "worst": worst,
            }
        )
    return found
