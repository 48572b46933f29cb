"""The optimizers of `penstock train`: their keys, how each is made, what it keeps, and the rate of each step.

To add one, write the class of its keys, the function that makes it, its line in OPTIMIZERS, and its class in
OptimizerSection. The config, resuming, and the dry run's tables read all they need from there.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeAlias

from pydantic import BeforeValidator, Discriminator, Field, Tag

from penstock.errors import ConfigError
from penstock.train.config.values import Beta, Fraction, Natural, NotNegative, Positive, Section

if TYPE_CHECKING:  # a config is read without torch, so that an error in it shows at once
    from torch import nn
    from torch.optim import AdamW, Optimizer

    from penstock.parallel.muon import Muon

FULL = "initial_lr"  # a group's full rate, by the name that torch's schedulers use
Named: TypeAlias = "Iterable[tuple[str, nn.Parameter]]"


# ---- The keys of the section `optimizer`


class AdamWKeys(Section):
    """AdamW, of all parameters or of those that Muon does not train."""

    learning_rate: Positive = 3e-4  # after the warm-up
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = (0.9, 0.95)  # of gradients, of their squares
    eps: Positive = 1e-8  # added to the divisor, which may be zero
    weight_decay: NotNegative = 0.1  # not on norms and biases


class AdamWSection(AdamWKeys):
    """AdamW of all parameters. Every rate rises linearly and falls along a cosine to a floor."""

    name: Literal["adamw"] = "adamw"  # optional
    warmup_steps: Natural = 0  # in which the rate rises
    final_fraction: Fraction = 0.1  # of the learning rate, at the last step


class MuonSection(Section):
    """Muon of the matrices inside layers (penstock.parallel.muon.matrices), AdamW of the rest:
    embeddings, head, norms, biases and routers. All rates rise and fall together.
    """

    name: Literal["muon"] = "muon"  # required
    learning_rate: Positive = 0.02  # of the matrices; with adjust: match_rms_adamw one such as AdamW's
    weight_decay: NotNegative = 0.1  # of the matrices
    momentum: Beta = 0.95  # of the gradients' running mean
    nesterov: bool = True  # step along the gradient and the mean together, not the mean alone
    ns_steps: Annotated[int, Field(ge=1, lt=100)] = 5  # of the iteration that makes a matrix orthogonal
    # The factor of a matrix's rate by its shape (rows, columns). original: the root of rows / columns where
    # that is more than 1; match_rms_adamw: 0.2 times the root of the larger one
    adjust: Literal["original", "match_rms_adamw"] = "original"
    adamw: AdamWKeys = AdamWKeys()  # of the rest
    warmup_steps: Natural = 0  # in which the rates rise
    final_fraction: Fraction = 0.1  # of each learning rate, at the last step


AnyOptimizer = AdamWSection | MuonSection


# ---- How each is made


def _adamw(section: AdamWKeys, named: Named) -> AdamW:
    """AdamW with weight decay on matrices only: on norms and biases it would pull a scale to zero.

    Biases are found by their names too, as those of stacked experts (gpt_oss) have two dimensions. Parameters
    of different meshes have groups of their own: AdamW computes on a group's tensors together, and torch
    does not mix DTensors of two meshes, or DTensors and plain tensors.
    """
    from torch import nn
    from torch.distributed.tensor import DTensor
    from torch.optim import AdamW

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


def _muon(section: MuonSection, named: Named) -> Muon:
    from penstock.parallel.muon import Muon

    return Muon(
        [{"params": [parameter for _, parameter in named], FULL: section.learning_rate}],
        lr=section.learning_rate,
        weight_decay=section.weight_decay,
        momentum=section.momentum,
        nesterov=section.nesterov,
        ns_steps=section.ns_steps,
        adjust_lr_fn=section.adjust,
    )


def _hidden_matrices(model: nn.Module, layers: str) -> frozenset[str]:
    """What Muon trains. Raises ConfigError where there is nothing."""
    from penstock.parallel.muon import matrices

    names = matrices(model, layers)
    if not any(model.get_parameter(name).requires_grad for name in names):
        rule = f"{type(model).__name__} has no matrix inside its layers that Muon could train"
        raise ConfigError("optimizer.name=muon", rule, "Set optimizer.name=adamw")
    return names


# ---- The table


class Share(NamedTuple):
    """What one class of optimizer does in a run.

    Attributes:
        make: the optimizer of some named parameters, from the config's section
        moments: the tensors of a parameter's shape that it keeps, by its names for them
        chosen: the names of what it trains, from the whole model (which may be on the meta device) and the
            name of its list of layers; None for all that the shares before it leave. Raises ConfigError
    """

    make: Callable[[Any, Named], Optimizer]
    moments: tuple[str, ...]
    chosen: Callable[[nn.Module, str], Collection[str]] | None = None


class Choice(NamedTuple):
    """What `optimizer.name` stands for. shares: by the optimizer's class name, as checkpoints have it"""

    section: type[AnyOptimizer]
    shares: Mapping[str, Share]


_OF_ADAMW = ("exp_avg", "exp_avg_sq")
OPTIMIZERS = {
    "adamw": Choice(AdamWSection, {"AdamW": Share(_adamw, _OF_ADAMW)}),
    "muon": Choice(
        MuonSection,
        {
            "Muon": Share(_muon, ("momentum_buffer",), _hidden_matrices),
            "AdamW": Share(lambda section, named: _adamw(section.adamw, named), _OF_ADAMW),
        },
    ),
}
MOMENTS = {kind: share.moments for choice in OPTIMIZERS.values() for kind, share in choice.shares.items()}


def _check_section(section: object) -> object:
    """Refuse unknown names, and keys of another optimizer. Of a union pydantic's own words are unclear."""
    if isinstance(section, Section):
        return section
    if not isinstance(section, dict):
        raise ValueError(f"{section!r} is no section; write keys such as {{name: muon, learning_rate: 0.02}}")
    name = section.get("name", "adamw")
    if name not in list(OPTIMIZERS):
        raise ValueError(f"name={name!r} is no optimizer of the trainer; write {' or '.join(OPTIMIZERS)}")
    known = OPTIMIZERS[name].section.model_fields
    for other, choice in OPTIMIZERS.items():
        foreign = [key for key in section if key in choice.section.model_fields and key not in known]
        if foreign:
            rule = f"with name={name} {' and '.join(foreign)} are {next(iter(choice.shares))}'s"
            remedy = f"set optimizer.name={other}, or leave them out"
            raise ValueError(f"{rule}; {f'write them into optimizer.{other}' if other in known else remedy}")
    return section


def _tag(section: Any) -> str:
    return "of " + str(section.get("name", "adamw") if isinstance(section, dict) else section.name)


OptimizerSection = Annotated[
    # tagged, so that an error names the keys of the optimizer that was meant
    Annotated[AdamWSection, Tag("of adamw")] | Annotated[MuonSection, Tag("of muon")],
    Discriminator(_tag),
    BeforeValidator(_check_section),
]


# ---- From a section to a run


def trained_by(section: AnyOptimizer, model: nn.Module, layers: str) -> dict[str, str]:
    """The class of optimizer that trains each parameter, if it is trained at all, by the parameter's name.

    Args:
        model: the whole model, which may be on the meta device
        layers: the name of its list of layers

    Raises: ConfigError where an optimizer has nothing to train.
    """
    found: dict[str, str] = {}
    everything = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for kind, share in OPTIMIZERS[section.name].shares.items():
        names = everything if share.chosen is None else share.chosen(model, layers)
        found |= {name: kind for name in names if name not in found}
    return found


def make_optimizers(section: AnyOptimizer, named: Named, kinds: Mapping[str, str]) -> list[Optimizer]:
    """The optimizers of one process: at least one, which may have nothing to train.

    Args:
        named: its parameters, by the whole model's names; frozen ones are left out
        kinds: the class of optimizer that trains each, from `trained_by`
    """
    shares = OPTIMIZERS[section.name].shares
    groups: dict[str, list[tuple[str, nn.Parameter]]] = {kind: [] for kind in shares}
    for name, parameter in named:
        if parameter.requires_grad:
            groups[kinds[name]].append((name, parameter))
    made = [share.make(section, groups[kind]) for kind, share in shares.items() if groups[kind]]
    return made or [[*shares.values()][-1].make(section, [])]


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
