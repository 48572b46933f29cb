"""AdamW over one process's parameters, and the learning rate of each step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from penstock.train.config import OptimizerSection


def make_optimizer(section: OptimizerSection, parameters: Iterable[nn.Parameter]) -> AdamW:
    """AdamW with weight decay on matrices only: on norms and biases it would pull a scale to zero.

    Parameters of another mesh have groups of their own: AdamW computes on those of a group together, and
    DTensors of two meshes, or beside plain tensors, cannot be.
    """
    matrices: dict[Any, list[nn.Parameter]] = {}
    vectors: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            (matrices if parameter.ndim > 1 else vectors).setdefault(mesh, []).append(parameter)
    nothing = [{"params": [nn.Parameter()]}]  # a stage may be empty, and AdamW asks for a parameter
    groups = [
        {"params": group, "weight_decay": decay}
        for kind, decay in ((matrices, section.weight_decay), (vectors, 0.0))
        for group in kind.values()
    ]
    return AdamW(
        groups or nothing,
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
