"""AdamW over one process's parameters, and the learning rate of each step."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import nn
from torch.optim import AdamW

from penstock.train.config import OptimizerSection


def make_optimizer(section: OptimizerSection, parameters: Iterable[nn.Parameter]) -> AdamW:
    """AdamW with weight decay on matrices only: on norms and biases it would pull a scale to zero."""
    matrices: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for parameter in parameters:
        if parameter.requires_grad:
            (matrices if parameter.ndim > 1 else vectors).append(parameter)
    nothing = [{"params": [nn.Parameter()]}]  # a stage may be empty, and AdamW asks for a parameter
    groups = [
        {"params": matrices, "weight_decay": section.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return AdamW(
        [group for group in groups if group["params"]] or nothing,
        lr=section.learning_rate,
        betas=section.betas,
        eps=section.eps,
    )


def learning_rate(section: OptimizerSection, steps: int, step: int) -> float:
    """What step `step` of 1 to `steps` takes: up in a line to the full rate, then down a cosine.

    The last step takes `final_fraction` of the full rate.
    """
    warmup = section.warmup_steps
    if step <= warmup:
        return section.learning_rate * step / warmup
    progress = (step - warmup) / (steps - warmup)
    cosine = (1 + math.cos(math.pi * progress)) / 2
    return section.learning_rate * (section.final_fraction + (1 - section.final_fraction) * cosine)


def set_learning_rate(optimizer: AdamW, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
