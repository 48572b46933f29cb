"""The optimizers of one process's parameters, and the learning rate of each step."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer
from transformers import PreTrainedModel

from penstock.errors import ConfigError
from penstock.parallel.muon import Muon, matrices
from penstock.train.config.sections import AdamWKeys, AdamWSection, MuonSection

AnyOptimizer = AdamWSection | MuonSection
FULL = "initial_lr"  # a group's full rate, by the name that torch's schedulers use


def muon_parameters(
    section: AdamWSection | MuonSection, model: PreTrainedModel, layers: str
) -> frozenset[str]:
    """The names of the parameters that Muon trains; none where AdamW trains all.

    Args:
        model: the whole model, which may be on the meta device
        layers: the name of its list of layers

    Raises: ConfigError where Muon is asked for and the model has no matrix for it.
    """
    if isinstance(section, AdamWSection):
        return frozenset()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    names = frozenset(name for name in matrices(model, layers) if parameters[name].requires_grad)
    if not names:
        rule = f"{type(model).__name__} has no matrix inside its layers that Muon could train"
        raise ConfigError("optimizer.name=muon", rule, "Set optimizer.name=adamw")
    return names


def make_optimizers(
    section: AdamWSection | MuonSection,
    named: Iterable[tuple[str, nn.Parameter]],
    muon_names: Collection[str],
) -> list[Optimizer]:
    """The optimizers of one process.

    Args:
        named: its parameters, by the whole model's names; frozen ones are left out
        muon_names: those that Muon trains
    """
    trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    rest = [(name, parameter) for name, parameter in trained if name not in muon_names]
    if isinstance(section, AdamWSection):
        return [_adamw(section, rest)]
    hidden = [parameter for name, parameter in trained if name in muon_names]
    optimizers: list[Optimizer] = [_muon(section, hidden)] if hidden else []
    if rest or not hidden:
        optimizers.append(_adamw(section.adamw, rest))
    return optimizers


def _muon(section: MuonSection, parameters: list[nn.Parameter]) -> Muon:
    return Muon(
        [{"params": parameters, FULL: section.learning_rate}],
        lr=section.learning_rate,
        weight_decay=section.weight_decay,
        momentum=section.momentum,
        nesterov=section.nesterov,
        ns_steps=section.ns_steps,
        adjust_lr_fn=section.adjust,
    )


def _adamw(section: AdamWKeys, named: Iterable[tuple[str, nn.Parameter]]) -> AdamW:
    """AdamW with weight decay on matrices only: on norms and biases it would pull a scale to zero.

    Biases are found by their names too, as those of stacked experts (gpt_oss) have two dimensions. Parameters
    of different meshes have groups of their own: AdamW computes on a group's tensors together, and torch
    does not mix DTensors of two meshes, or DTensors and plain tensors.
    """
    groups: dict[Any, list[nn.Parameter]] = defaultdict(list)
    for name, parameter in named:
        matrix = parameter.ndim > 1 and "bias" not in name.rpartition(".")[2]
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups[not matrix, mesh].append(parameter)
    made = [
        {
            "params": groups[key],
            "weight_decay": 0.0 if key[0] else section.weight_decay,
            FULL: section.learning_rate,
        }
        for key in sorted(groups, key=lambda key: key[0])  # matrices first: a checkpoint's order of groups
    ]
    empty = [{"params": [nn.Parameter()]}]  # a stage may hold nothing, and AdamW wants a parameter
    return AdamW(made or empty, lr=section.learning_rate, betas=section.betas, eps=section.eps)


def learning_rate(section: AnyOptimizer, full: float, steps: int, step: int) -> float:
    """The rate of step `step` of 1 to `steps`: a linear warm-up to `full`, then a cosine down.

    The last step takes `final_fraction` of the full rate.
    """
    warmup = section.warmup_steps
    if step <= warmup:
        return full * step / warmup
    progress = (step - warmup) / (steps - warmup)
    cosine = (1 + math.cos(math.pi * progress)) / 2
    return full * (section.final_fraction + (1 - section.final_fraction) * cosine)


def set_learning_rates(section: AnyOptimizer, optimizers: Sequence[Optimizer], steps: int, step: int) -> None:
    """Set every group's rate for step `step` of `steps`."""
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["lr"] = learning_rate(section, group.get(FULL, section.learning_rate), steps, step)
