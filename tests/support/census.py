"""Whether a model type is exact when it is cut: its tiny model, split, against the whole one in torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from penstock import AutoPipeline
from penstock.errors import ModelError
from penstock.models.tracing.chain import Chain, find_chain
from support import zoo
from support.reference import TOLERANCE, Gradients, assert_gradients, gradients_of, plain_steps

MICROBATCHES = 2


@dataclass(frozen=True)
class Verdict:
    """chain: where the model is one; refusal: why it is not; own_loss: what transformers gives with labels"""

    kind: str
    chain: Chain | None
    refusal: str = ""
    loss: float = float("nan")
    own_loss: float = float("nan")


def judge(
    model_type: str,
    stages: Sequence[int] = (2, 4),
    *,
    schedule: Any = "1f1b",
    dtype: torch.dtype = torch.float32,
    checkpointing: Any = False,
    **changes: Any,
) -> Verdict:
    """Raises AssertionError where a split model is accepted and differs, in training mode."""
    if model_type in zoo.SKIPPED:
        return Verdict("", None, zoo.SKIPPED[model_type])
    model = zoo.tiny_model(model_type, dtype, **changes)
    kind, batch = type(model).__name__, zoo.tiny_batch(model_type)
    try:
        chain = find_chain(model)
        auto = AutoPipeline(
            schedule=schedule, microbatches=MICROBATCHES, activation_checkpointing=checkpointing
        )
        pipes = [replace(auto, ranks=count).build(model) for count in stages]
        results = [pipe.step(batch) for pipe in pipes]
    except ModelError as refused:
        return Verdict(kind, None, refused.rule)
    loss, gradients = plain(model, batch)
    for pipe, result in zip(pipes, results, strict=True):
        assert abs(result.loss - loss) <= TOLERANCE[dtype] * max(1.0, abs(loss)), (result.loss, loss)
        found = gradients_of(pipe)
        held = {name for name, _ in pipe.named_parameters(remove_duplicate=False)}
        assert all(held.intersection(names) for names in names_of(model)), "a stage lacks a weight"
        assert found.keys() == held & gradients.keys(), "a gradient is missing, or one too many"
        assert_gradients(found, gradients, TOLERANCE[dtype])
    own = own_loss(model, batch)
    assert abs(own - loss) <= 1e-4 * max(1.0, abs(own)), "the loss is not the model's own"
    return Verdict(kind, chain, "", loss, own)


def names_of(model: PreTrainedModel) -> list[set[str]]:
    """Of each weight all names that it appears under."""
    found: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), set()).add(name)
    return list(found.values())


def microbatches(batch: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    chunks = zip(*(value.chunk(MICROBATCHES) for value in batch.values()), strict=True)
    return [dict(zip(batch, values, strict=True)) for values in chunks]


def plain(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> tuple[float, Gradients]:
    """Microbatch by microbatch: an auxiliary loss is a mean over each."""
    return plain_steps(model, microbatches(batch), shifted=is_shifted(model))


def is_shifted(model: PreTrainedModel) -> bool:
    return model.config.model_type not in zoo.UNSHIFTED


@torch.no_grad()
def own_loss(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> float:
    """The mean of the losses that the model itself makes of the labels, by valid tokens."""
    split = microbatches(batch)
    first = int(is_shifted(model))
    valid = [int((microbatch["labels"][:, first:] != -100).sum()) for microbatch in split]
    losses = [float(model(**microbatch, use_cache=False).loss) for microbatch in split]
    return sum(loss * count for loss, count in zip(losses, valid, strict=True)) / sum(valid)
