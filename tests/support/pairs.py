"""Pairs of rows for losses of preferences, and what one plain process computes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from support.reference import Gradients, gradients_of

_PROMPT = 4


def pair_batch(pairs: int, length: int = 10, seed: int = 0) -> dict[str, Tensor]:
    """Chosen and rejected rows in turn, of one prompt a pair; some completions are shorter than others."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 64, (2 * pairs, length), generator=generator)
    ids[1::2, :_PROMPT] = ids[::2, :_PROMPT]
    labels = ids.clone()
    labels[:, :_PROMPT] = -100
    for row in range(2 * pairs):
        labels[row, length - row % 4 :] = -100
    return {"input_ids": ids, "labels": labels}


def plain_logps(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Each row's summed log-probability of its labels, and their number; one forward of the whole batch."""
    logits = model(input_ids=batch["input_ids"], use_cache=False).logits[:, :-1]
    labels = batch["labels"][:, 1:]
    counted = labels != -100
    of_tokens = torch.log_softmax(logits, -1).gather(2, labels.clamp(min=0)[..., None])[..., 0]
    return (of_tokens * counted).sum(1), counted.sum(1)


def plain_gradients(model: nn.Module, loss: Callable[[], Tensor]) -> tuple[float, Gradients]:
    """The value of `loss` and the gradients of the model's parameters; its own are cleared."""
    model.zero_grad()
    value = loss()
    value.backward()  # type: ignore[no-untyped-call]
    gradients = gradients_of(model)
    model.zero_grad()
    return float(value.detach()), gradients
