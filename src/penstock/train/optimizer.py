"""The optimizers of one process's parameters, and the learning rate of each step."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer
from transformers import PreTrainedModel

from penstock.errors import ConfigError
from penstock.parallel.muon import Muon, matrices
from penstock.train.config.sections import AdamWKeys, AdamWSection, MuonSection

FULL = "initial_lr"  # a group's full rate, by the name that torch's own schedulers give it


def by_muon(section: AdamWSection | MuonSection, model: PreTrainedModel, layers: str) -> frozenset[str]:
    """Names of the parameters that Muon trains; none where AdamW trains all.

    model: the whole one, which may be on the meta device; layers: the name of its layers' list
    Raises ConfigError where Muon is asked for and the model has none.
    """
    if isinstance(section, AdamWSection):
        return frozenset()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    names = frozenset(name for name in matrices(model, layers) if parameters[name].requires_grad)
    if not names:
        raise ConfigError(
            "optimizer.name=muon",
            f"{type(model).__name__} has no matrix inside of its layers that Muon is for",
            "Set optimizer.name=adamw",
        )
    return names


def make_optimizers(
    section: AdamWSection | MuonSection, named: Iterable[tuple[str, nn.Parameter]], muons: Collection[str]
) -> list[Optimizer]:
    """Those of one process; it may hold no parameter of one kind.

    named: its parameters, by the whole model's names; muons: the names of those that Muon trains
    """
    trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    rest = [(name, parameter) for name, parameter in trained if name not in muons]
    hidden = [parameter for name, parameter in trained if name in muons]
    if isinstance(section, AdamWSection):
        return [_adamw(section, rest)]
    made: list[Optimizer] = [_muon(section, hidden)] if hidden else []
    if rest or not hidden:
        made.append(_adamw(section.adamw, rest))
    return made


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
    """With weight decay on matrices only: on norms and biases it would pull a scale to zero.

    Biases are known by their names, too: those of experts that stand together (gpt_oss) have two dimensions.

    Parameters of another mesh have groups of their own: AdamW computes on those of a group together, and
    DTensors of two meshes, or beside plain tensors, cannot be.
    """
    many: dict[Any, list[nn.Parameter]] = {}
    vectors: dict[Any, list[nn.Parameter]] = {}
    for name, parameter in named:
        matrix = parameter.ndim > 1 and "bias" not in name.rpartition(".")[2]
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        (many if matrix else vectors).setdefault(mesh, []).append(parameter)
    nothing = [{"params": [nn.Parameter()]}]  # a stage may be empty, and AdamW asks for a parameter
    groups = [
        {"params": group, "weight_decay": decay, FULL: section.learning_rate}
        for kind, decay in ((many, section.weight_decay), (vectors, 0.0))
        for group in kind.values()
    ]
    return AdamW(
        groups or nothing,
        lr=section.learning_rate,
        betas=section.betas,
        eps=section.eps,
    )


def learning_rate(section: AdamWSection | MuonSection, full: float, steps: int, step: int) -> float:
    """What step `step` of 1 to `steps` takes: up in a line to the `full` rate, then down a cosine.

    The last step takes `final_fraction` of the full rate.
    """
    warmup = section.warmup_steps
    if step <= warmup:
        return full * step / warmup
    progress = (step - warmup) / (steps - warmup)
    cosine = (1 + math.cos(math.pi * progress)) / 2
    return full * (section.final_fraction + (1 - section.final_fraction) * cosine)


def set_learning_rates(
    section: AdamWSection | MuonSection, optimizers: Sequence[Optimizer], steps: int, step: int
) -> None:
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["lr"] = learning_rate(section, group.get(FULL, section.learning_rate), steps, step)
