"""The optimizers of `penstock train`: their config keys, how each is made, and the size of its state.

To add one, write the class of its keys, the function that makes it, its line in OPTIMIZERS, and its class in
OptimizerSection. The config, resuming, and the dry run read all they need from there. torchao's optimizers
are in low_bit.py.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Self, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator

from penstock.errors import ConfigError
from penstock.options import NotNegative
from penstock.parallel.axes import Axes
from penstock.train.config.values import Beta, Positive, Section, tag, tag_by
from penstock.train.optimizers import low_bit
from penstock.train.optimizers.rates import RateKeys, learning_rate

if TYPE_CHECKING:  # a config is read without torch, so that an error in it is raised at once
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from penstock.parallel.muon import Muon

FULL = "initial_lr"  # a group's full rate, by the name that torch's schedulers use
Named: TypeAlias = "Iterable[tuple[str, nn.Parameter]]"


# ---- The keys of the section `optimizer`


def _expression(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"{text!r} is no regular expression ({error})") from error
    return text


class GroupSection(Section):
    """Parameters with a rate or a decay of their own."""

    match: Annotated[str, AfterValidator(_expression)]  # a regular expression: any part of their names
    learning_rate: Positive | None = None  # none: that of all
    weight_decay: NotNegative | None = None  # of norms and biases too; none: as for other parameters

    @model_validator(mode="after")
    def sets_something(self) -> Self:
        if self.learning_rate is None and self.weight_decay is None:
            raise ValueError(f"match={self.match!r} sets nothing; give learning_rate, weight_decay, or both")
        return self


class GroupedKeys(Section):
    """An optimizer whose parameters may have rates and decays of their own."""

    learning_rate: Positive = 3e-4  # after the warm-up
    weight_decay: NotNegative = 0.1  # not on norms and biases
    groups: Annotated[tuple[GroupSection, ...], Field(strict=False)] = ()  # the first that matches counts

    def group_of(self, name: str) -> int | None:
        """The index of the group that this parameter is in; None for no group."""
        return next((n for n, group in enumerate(self.groups) if re.search(group.match, name)), None)


class AdamWKeys(GroupedKeys):
    """AdamW, of all parameters or of those that Muon does not train."""

    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = (0.9, 0.95)  # of gradients, of their squares
    eps: Positive = 1e-8  # added to the divisor, which may be zero
    fused: bool = True  # torch's one kernel for all tensors, which rounds differently from several kernels
    # The format of the two moments, by torchao; 8bit, 4bit and fp8 have a scale for each 256 or 128 entries,
    # and tensors below 4,096 entries keep the weights' dtype. null: the weights' dtype for all, by torch
    states: Literal["bfloat16", "8bit", "4bit", "fp8"] | None = None
    # Of bfloat16 weights, by torchao: up or down, the nearer the likelier, so that small steps are not lost
    stochastic_rounding: bool = False

    @property
    def by_torchao(self) -> str:
        """The first key that needs torchao, with its value; empty if none does."""
        if self.states is not None:
            return f"states={self.states}"
        return "stochastic_rounding=true" if self.stochastic_rounding else ""


class AdamWSection(RateKeys, AdamWKeys):
    """AdamW of all parameters."""

    name: Literal["adamw"] = "adamw"  # optional


class AdafactorSection(RateKeys, GroupedKeys):
    """Adafactor of all parameters: its state of a matrix is a row and a column."""

    name: Literal["adafactor"] = "adafactor"  # required
    learning_rate: Positive = 0.01  # times the root mean square of a parameter's entries
    weight_decay: NotNegative = 0.0  # not on norms and biases
    beta2_decay: Annotated[float, Field(le=0)] = -0.8  # step ** beta2_decay: the weight of the newest squares
    # the number added to squares (null: the dtype's epsilon, squared), and the least root mean square
    eps: Annotated[tuple[NotNegative | None, NotNegative], Field(strict=False)] = (None, 1e-3)
    d: Annotated[float, Field(ge=1)] = 1.0  # the largest root mean square of an update, before the rate


class MuonSection(RateKeys):
    """Muon of the matrices inside layers (penstock.parallel.muon.matrices), AdamW of the rest:
    embeddings, head, norms, biases and routers.
    """

    name: Literal["muon"] = "muon"  # required
    learning_rate: Positive = 0.02  # of the matrices; with adjust: match_rms_adamw one such as AdamW's
    weight_decay: NotNegative = 0.1  # of the matrices
    momentum: Beta = 0.95  # of the gradients' running mean
    nesterov: bool = True  # step along the gradient and the mean together, not the mean alone
    ns_steps: Annotated[int, Field(ge=1, lt=100)] = 5  # of the iteration that makes a matrix orthogonal
    # The factor of a matrix's rate by its shape (rows, columns). original: the root of rows / columns if
    # that is more than 1; match_rms_adamw: 0.2 times the root of the larger one
    adjust: Literal["original", "match_rms_adamw"] = "original"
    adamw: AdamWKeys = AdamWKeys()  # of the rest


# ---- How each is made


def _groups(section: GroupedKeys, named: Named) -> list[dict[str, Any]]:
    """Groups by rate and decay, with the names of their parameters. Weight decay applies to matrices, and to
    groups that set it: on norms and biases decay would pull a scale to zero.

    Biases are detected by name too, as those of stacked experts (gpt_oss) have two dimensions. Parameters
    of different meshes have groups of their own: AdamW computes on a group's tensors together, and torch
    does not mix DTensors of two meshes, or DTensors and plain tensors.
    """
    from torch import nn
    from torch.distributed.tensor import DTensor

    groups: dict[tuple[float, float, Any], list[tuple[str, nn.Parameter]]] = defaultdict(list)
    for name, parameter in named:
        matrix = parameter.ndim > 1 and "bias" not in name.rpartition(".")[2]
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        rate, decay = section.learning_rate, section.weight_decay if matrix else 0.0
        if (index := section.group_of(name)) is not None:
            group = section.groups[index]
            rate = rate if group.learning_rate is None else group.learning_rate
            decay = decay if group.weight_decay is None else group.weight_decay
        groups[decay, rate, mesh].append((name, parameter))
    param_groups = [
        {"params": groups[key], "weight_decay": key[0], FULL: key[1]}
        for key in sorted(groups, key=lambda key: key[:2], reverse=True)
    ]
    return param_groups or [{"params": [("", nn.Parameter())]}]  # a stage may hold nothing


def _adamw(section: AdamWKeys, named: Named) -> Optimizer:
    from torch.optim import AdamW

    options: dict[str, Any] = {"lr": section.learning_rate, "betas": section.betas, "eps": section.eps}
    if section.by_torchao:
        return low_bit.make(section.states, _groups(section, named), section.stochastic_rounding, **options)
    return AdamW(_groups(section, named), fused=section.fused, **options)


def _adafactor(section: AdafactorSection, named: Named) -> Optimizer:
    from torch.optim import Adafactor

    keys = ("beta2_decay", "eps", "d")
    options = {key: getattr(section, key) for key in keys}
    return Adafactor(_groups(section, named), lr=section.learning_rate, **options)


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
    """The names of the weights that Muon trains. Raises ConfigError if there are none."""
    from penstock.parallel.muon import matrices

    names = matrices(model, layers)
    if not any(model.get_parameter(name).requires_grad for name in names):
        rule = f"{type(model).__name__} has no matrix inside its layers that Muon could train"
        raise ConfigError("optimizer.name=muon", rule, "Set optimizer.name=adamw")
    return names


# ---- Combinations that are refused


class RunFacts(NamedTuple):
    """The facts of a run by which an optimizer is accepted or refused.

    dtype: of the weights
    axes: the mesh's axes other than the pipeline's
    """

    dtype: str
    axes: Axes


def _check_adamw(keys: AdamWKeys, key: str, run: RunFacts) -> None:
    if keys.stochastic_rounding and run.dtype != "bfloat16":
        rule = f"it rounds bfloat16 weights, and here they are {run.dtype}, in which no step is lost"
        remedy = "Set train.precision=bfloat16, or leave it out"
        raise ConfigError(f"{key}.stochastic_rounding=true", rule, remedy)
    if not keys.by_torchao:
        return
    value = f"{key}.{keys.by_torchao}"
    if run.dtype == "float64":
        raise ConfigError(f"{value} with model.dtype=float64", "torchao computes in float32", "Leave it out")
    if run.axes != Axes():
        rule = "other shards have other blocks and other random bits, so the mesh would change the run"
        raise ConfigError(f"{value} on {run.axes}", rule, "Leave the axes out, or this key")


def _check_adafactor(keys: AdafactorSection, key: str, run: RunFacts) -> None:
    if run.axes != Axes():
        rule = "it computes means over whole rows and columns, and these axes shard weights"
        raise ConfigError(f"{key}.name=adafactor on {run.axes}", rule, "Leave the axes out, or take adamw")


# ---- The table


class Share(NamedTuple):
    """The part of one class of optimizer in a run.

    Attributes:
        name: its name in the config; next to Muon, adamw trains the rest
        keys: the section that it is made from; one key is learning_rate
        key: the name of that section in the config
        make: the optimizer of some named parameters, from the keys
        kept: the bytes of its state of a parameter, from the number of entries on this rank
        check: function of keys, key and run. Raises ConfigError if it is not exact there, or not possible
        chosen: the names of the weights that it trains, from the whole model (which may be on the meta
            device) and the name of its list of layers; None for all that earlier shares leave. Raises
            ConfigError
    """

    name: str
    keys: Any
    key: str
    make: Callable[[Any, Named], Optimizer]
    kept: Callable[[Tensor, int], float]
    check: Callable[[Any, str, RunFacts], None] = lambda keys, key, run: None
    chosen: Callable[[nn.Module, str], Collection[str]] | None = None


class OptimizerChoice(NamedTuple):
    """A value of `optimizer.name`.

    title: as people write it
    shares: from the section, by the optimizer's class name, as checkpoints have it
    shaped: the names of its state tensors that have the parameter's shape
    """

    title: str
    section: type[OptimizerSection]
    shares: Callable[[Any], Mapping[str, Share]]
    shaped: tuple[str, ...]


def _adamw_share(keys: AdamWKeys, key: str = "optimizer") -> dict[str, Share]:
    kind, kept = "AdamW", _tensors(2)
    if keys.states is not None:
        kind, kept = low_bit.NAMES[keys.states], partial(low_bit.kept, keys.states)
    return {kind: Share("adamw", keys, key, _adamw, kept, _check_adamw)}


def _muon_shares(section: MuonSection) -> dict[str, Share]:
    muon = Share("muon", section, "optimizer", _muon, _tensors(1), chosen=_hidden_matrices)
    return {"Muon": muon, **_adamw_share(section.adamw, "optimizer.adamw")}


def _adafactor_share(section: AdafactorSection) -> dict[str, Share]:
    kept, check = _rows_and_columns, _check_adafactor
    return {"Adafactor": Share("adafactor", section, "optimizer", _adafactor, kept, check)}


def _tensors(count: int) -> Callable[[Tensor, int], float]:
    """The bytes of so many tensors like the parameter."""
    return lambda parameter, entries: count * parameter.itemsize * entries


def _rows_and_columns(parameter: Tensor, entries: int) -> float:
    if parameter.ndim < 2:
        return parameter.itemsize * entries
    return parameter.itemsize * (entries / parameter.shape[-1] + entries / parameter.shape[-2])


OPTIMIZERS = {
    "adamw": OptimizerChoice("AdamW", AdamWSection, _adamw_share, ("exp_avg",)),
    "muon": OptimizerChoice("Muon", MuonSection, _muon_shares, ("momentum_buffer",)),
    "adafactor": OptimizerChoice("Adafactor", AdafactorSection, _adafactor_share, ("variance",)),
}
SHAPED = tuple(part for choice in OPTIMIZERS.values() for part in choice.shaped)


def shares_of(section: OptimizerSection) -> Mapping[str, Share]:
    """The shares of a run, by the class names of its optimizers."""
    return OPTIMIZERS[section.name].shares(section)


def _check_section(section: object) -> object:
    """Refuse unknown names, and keys of another optimizer: pydantic's words for a union are unclear."""
    if isinstance(section, Section):
        return section
    if not isinstance(section, dict):
        raise ValueError(f"{section!r} is no section; write keys such as {{name: muon, learning_rate: 0.02}}")
    name = section.get("name", "adamw")
    if name not in list(OPTIMIZERS):
        remedy = _elsewhere(str(name)) or f"write {' or '.join(OPTIMIZERS)}"
        raise ValueError(f"name={name!r} is no optimizer of the trainer; {remedy}")
    known = OPTIMIZERS[name].section.model_fields
    for other, choice in OPTIMIZERS.items():
        foreign = [key for key in section if key in choice.section.model_fields and key not in known]
        if foreign:
            rule = f"with name={name} {' and '.join(foreign)} are {choice.title}'s"
            remedy = f"set optimizer.name={other}, or leave them out"
            raise ValueError(f"{rule}; {f'write them into optimizer.{other}' if other in known else remedy}")
    return section


def _elsewhere(name: str) -> str:
    """The remedy for the name of an optimizer in another trainer; empty for a name that none has."""
    kind = next((kind for kind in OPTIMIZERS if name.lower().replace("-", "").startswith(kind)), "")
    states = {"8bit": "8bit", "4bit": "4bit", "fp8": "fp8"}
    low = next((states[bits] for bits in states if bits in name.lower()), None)
    if kind == "adamw" and low is not None:
        return f"write name: adamw and states: {low}"
    return f"write name: {kind}" if kind else ""


OptimizerSection = Annotated[
    Annotated[AdamWSection, Tag(tag("adamw"))]
    | Annotated[MuonSection, Tag(tag("muon"))]
    | Annotated[AdafactorSection, Tag(tag("adafactor"))],
    Discriminator(tag_by("name", "adamw")),
    BeforeValidator(_check_section),
]


# ---- From a section to a run


def check_optimizer(section: OptimizerSection, run: RunFacts) -> None:
    """Raise ConfigError for an optimizer that is not exact, or not possible, in such a run."""
    for share in shares_of(section).values():
        share.check(share.keys, share.key, run)


def check_installed(section: OptimizerSection) -> None:
    """Raise ConfigError if the section needs torchao, and it is not installed."""
    for share in shares_of(section).values():
        if isinstance(share.keys, AdamWKeys) and share.keys.by_torchao:
            low_bit.check_installed(f"{share.key}.{share.keys.by_torchao}")


def trained_by(section: OptimizerSection, model: nn.Module, layers: str) -> dict[str, str]:
    """The class of optimizer for each parameter, by the parameter's name, frozen ones included.

    Args:
        model: the whole model, which may be on the meta device
        layers: the name of its list of layers

    Raises: ConfigError if an optimizer, or a group of the config, has nothing to train.
    """
    from penstock.models.weights.files import tied_names

    kinds: dict[str, str] = {}
    everything = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for kind, share in shares_of(section).items():
        names = everything if share.chosen is None else share.chosen(model, layers)
        kinds |= {name: kind for name in names if name not in kinds}
    copies = {name for names in tied_names(model) for name in names[1:]}  # in the group of their first name
    for kind, share in shares_of(section).items():
        if isinstance(share.keys, GroupedKeys):
            _check_groups(share, [name for name in kinds if kinds[name] == kind and name not in copies])
    return kinds


def _check_groups(share: Share, names: Sequence[str]) -> None:
    """Raise ConfigError for a group that none of the parameters `names` is in."""
    keys: GroupedKeys = share.keys
    met = {keys.group_of(name) for name in names}
    for index, group in enumerate(keys.groups):
        if index not in met:
            taken = any(re.search(group.match, name) for name in names)
            raise ConfigError(
                f"{share.key}.groups[{index}].match={group.match}",
                "earlier groups have all that it matches"
                if taken
                else f"no parameter that {OPTIMIZERS[share.name].title} trains has such a name",
                "Put it before them" if taken else f"Names are such as {names[len(names) // 2]}",
            )


def make_optimizers(section: OptimizerSection, named: Named, kinds: Mapping[str, str]) -> list[Optimizer]:
    """The optimizers of one process: at least one, which may have nothing to train.

    Args:
        named: its parameters, by the whole model's names; frozen ones are left out
        kinds: the class of optimizer that trains each, from `trained_by`
    """
    shares = shares_of(section)
    groups: dict[str, list[tuple[str, nn.Parameter]]] = {kind: [] for kind in shares}
    for name, parameter in named:
        if parameter.requires_grad:
            groups[kinds[name]].append((name, parameter))
    used = [kind for kind in shares if groups[kind]] or [*shares][-1:]
    return [shares[kind].make(shares[kind].keys, groups[kind]) for kind in used]


def set_learning_rates(
    section: OptimizerSection, optimizers: Sequence[Optimizer], steps: int, step: int
) -> None:
    """Set every group's rate for step `step` of `steps`."""
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        rate = learning_rate(section, group.get(FULL, section.learning_rate), steps, step)
        if isinstance(group["lr"], float | int):
            group["lr"] = rate
        else:  # torchao's, a tensor, so that its kernel is compiled once
            group["lr"].fill_(rate)


def learning_rates(section: OptimizerSection, steps: int, step: int) -> dict[str, float]:
    """The rates of step `step` of `steps`: by the optimizer's name, and by the pattern of each group."""
    full: dict[str, float] = {}
    for share in shares_of(section).values():
        full[share.name] = share.keys.learning_rate
        for group in share.keys.groups if isinstance(share.keys, GroupedKeys) else ():
            full[group.match] = group.learning_rate or share.keys.learning_rate
    return {name: learning_rate(section, rate, steps, step) for name, rate in full.items()}
