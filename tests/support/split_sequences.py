"""Losses and gradients of sequences that are split over ranks."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from penstock.parallel.context.attention import Method, parallelize_attention
from penstock.parallel.context.sequence import split
from support.mixtures import differences, gathered, valid
from support.reference import plain_step
from support.sequences import Batch


def loss_of(model: PreTrainedModel, batch: Mapping[str, Any]) -> Tensor:
    """This rank's share of the mean over all valid tokens of `batch`, by a parallel model."""
    part = split(batch, dist.get_rank(), dist.get_world_size())
    logits = model(**part, use_cache=False).logits
    labels = part["shift_labels"].flatten()
    total = F.cross_entropy(logits.flatten(0, 1), labels, ignore_index=-100, reduction="sum")
    return total / valid(batch)


def parallel(model: PreTrainedModel, method: Method) -> PreTrainedModel:
    copied = copy.deepcopy(model)
    group = dist.group.WORLD
    assert group is not None
    parallelize_attention(copied, group, method)
    return copied


def differing(
    label: str, model: PreTrainedModel, batch: Batch, method: Method, tolerance: float, again: bool = False
) -> list[str]:
    """Where a parallel copy of the model differs from it. again: layers run again in the backward"""
    loss, expected = plain_step(model, batch)
    if math.isnan(loss):  # gemma2 in float64: transformers adds float64's least number to scores in float32
        return []
    copied = parallel(model, method)
    if again:
        copied.gradient_checkpointing_enable({"use_reentrant": False})
    own = loss_of(copied, batch)
    own.backward()  # type: ignore[no-untyped-call]
    return differences(label, own, loss, gathered(copied), expected, tolerance)


HOW: tuple[Method, ...] = ("ring", "ulysses")
