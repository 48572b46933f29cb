"""The steps in which a pipeline is built, each to be had alone, for models and loops of one's own.

    names   = names_per_stage(model, stages)        which modules stand on which stage
    part    = split(model, names, stage)            a copy of the model that holds no more than these
    stage   = make_stage(stage, part, device)       ready to run: checkpointed, wrapped as the user likes
    schedule = make_schedule("1f1b", ranks, microbatches)

AutoPipeline and Pipeline.from_provider are made of them. `provider_of` puts the first two together, so that a
model of one's own that is a chain goes into a pipeline as it is:

    names = names_per_stage(model, stages=4)
    pipe = Pipeline.from_provider(provider_of(model, names), schedule="1f1b", ranks=4, microbatches=8)
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from penstock.errors import ModelError, PartitionError
from penstock.models.balance import LayerCosts
from penstock.models.chain import find_chain
from penstock.models.checkpointing import Checkpointing, install
from penstock.models.named_modules import ModuleNames
from penstock.models.partition import partition
from penstock.models.protocol import ProvidedCall, Provider, StageInfo, own_layers
from penstock.options import Parallelize
from penstock.runtime.stage import Shards, Stage, StageCall
from penstock.schedule import Schedule
from penstock.schedule.config import chosen_schedule as make_schedule
from penstock.wrapped import wrap

__all__ = [
    "Absent",
    "layers_of",
    "make_schedule",
    "make_stage",
    "module_names",
    "names_per_stage",
    "own_stages",
    "provider_of",
    "split",
]

Names = Sequence[Sequence[str]]  # for each stage, of the modules that it holds


def module_names(model: nn.Module, layers: str | None = None) -> ModuleNames:
    """The names of the model's modules, in the order in which they run.

    A transformers model tells it by itself. Of any other the order is that in which modules were assigned,
    and its layers are those of its one ModuleList, ModuleDict or Sequential. Activations, dropout and the
    like are among them; modules of buffers alone (tables of positions) are not, and are on every stage.
    layers: the name of that list, where there are several; "" for the model itself
    Raises ModelError.
    """
    if isinstance(model, PreTrainedModel):
        return ModuleNames.of(find_chain(model))
    name = _only_list(model) if layers is None else layers
    try:
        listed = model.get_submodule(name)
    except AttributeError as cause:
        raise ModelError(f"layers={name!r}", "the model has no such module", "Name its list") from cause
    prefix = f"{name}." if name else ""
    before, after = _around(model, name)
    return ModuleNames(before, tuple(prefix + child for child, _ in listed.named_children()), after)


def names_per_stage(
    model: nn.Module,
    stages: int,
    *,
    layers: str | None = None,
    layout: str | None = None,
    layers_per_stage: int | Sequence[int] | None = None,
    first_stage_layers: int | None = None,
    last_stage_layers: int | None = None,
    balance: LayerCosts | Sequence[float] | None = None,
    embedding_weight: int = 1,
    head_weight: int = 1,
) -> list[tuple[str, ...]]:
    """For each stage the names of the modules that it holds: layers dealt out as `partition` says, evenly by
    default; what stands before them is on the first stage, and what stands after them on the last.

    layers: see `module_names`

    Only modules are divided: arithmetic that the model's own forward does between them (a scale, a residual,
    a skip) runs on every stage, and is not seen. ``pipe.verify_against(model, batch)`` tells.

    Raises ModelError, PartitionError, ConfigError.
    """
    names = module_names(model, layers)
    shares = partition(
        len(names.layers),
        stages,
        layout=layout,
        layers_per_stage=layers_per_stage,
        first_stage_layers=first_stage_layers,
        last_stage_layers=last_stage_layers,
        balance=balance,
        embedding_weight=embedding_weight,
        head_weight=head_weight,
    )
    return names.per_stage(shares)


class Absent(nn.Module):
    """Stands for a module of another stage: it gives back the first argument that it gets."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return next(iter((*args, *kwargs.values())), None)


def split(
    model: nn.Module, names: Names, stage: int, *, absent: Literal["identity", "none"] = "identity"
) -> nn.Module:
    """A copy of `model` that holds the modules of one stage; `model` is left as it was.

    names: for each stage those of its modules, and of parameters that stand in no module of their own;
        every parameter of the model is named once. Modules without parameters that are not named are on
        every stage.
    absent: what stands in the place of the others. "identity": a module that gives back its first argument,
        which suits a forward that calls one module after the other. "none": None; out of lists and
        dicts they are taken, where the rest keep their names.

    Only modules are divided: arithmetic that the model's own forward does between them (a scale, a residual,
    a skip) runs on every stage, and is not seen. ``pipe.verify_against(model, batch)`` tells.

    What belongs to other stages is never copied, and on the meta device (`torch.device("meta")`) nothing is.
    Raises PartitionError for names that do not fit the model, ModelError for a weight of two stages.
    """
    if isinstance(model, PreTrainedModel):
        raise ModelError(
            f"split() of a {type(model).__name__}",
            "a transformers model keeps its own forward, which needs more than its modules",
            "Use AutoPipeline(modules_per_stage=names).build(model)",
        )
    check_names(model, names)
    own = set(names[stage])
    others = [name for of in names for name in of if name not in own]
    memo: dict[int, Any] = {}
    gone = [name for name in others if _is_module(model, name)]
    for name in gone:
        memo[id(model.get_submodule(name))] = Absent()
    for name in others:
        if name not in gone:
            memo[id(model.get_parameter(name))] = nn.Parameter(torch.empty(0), requires_grad=False)
    if torch.get_default_device().type == "meta":
        memo |= {id(tensor): _empty(tensor) for tensor in (*model.parameters(), *model.buffers())}
    part = copy.deepcopy(model, memo)
    for name in others:
        around, last = _holder(part, name)
        if name not in gone:
            around._parameters[last] = None
        elif absent == "none":
            _take_out(around, last)
    return part


def provider_of(
    model: nn.Module, names: Names, *, absent: Literal["identity", "none"] = "identity"
) -> Provider:
    """For Pipeline.from_provider: each stage's part of `model`, as `split` makes it. Raises as it does.

    Only modules are divided: arithmetic that the model's own forward does between them (a scale, a residual,
    a skip) runs on every stage, and is not seen. ``pipe.verify_against(model, batch)`` tells.
    """
    check_names(model, names)

    def provider(info: StageInfo) -> nn.Module:
        if info.stages != len(names):
            raise PartitionError(
                f"names of {len(names)} stages",
                f"the schedule has {info.stages}",
                f"Give {info.stages} lists",
            )
        return split(model, names, info.stage, absent=absent)

    return provider


def layers_of(part: nn.Module) -> list[tuple[int, nn.Module]]:
    """The layers that a stage holds, with their numbers in the whole model."""
    return [(number, layer) for number, layer in own_layers(part) if not isinstance(layer, Absent)]


def make_stage(
    index: int,
    part: nn.Module,
    device: torch.device,
    *,
    layers: Sequence[tuple[int, nn.Module]] | None = None,
    checkpointing: Checkpointing | None = None,
    parallelize_fn: Parallelize | None = None,
    call: Callable[[nn.Module], StageCall] = ProvidedCall,
    spread: Callable[[nn.Module, Sequence[nn.Module]], Shards | None] | None = None,
) -> Stage:
    """Stage `index`, ready to run: on its device, its layers checkpointed, wrapped as the user likes.

    layers: those of `part`, with their numbers; None looks for its lists
    parallelize_fn: see penstock.options.Options
    call: how to run what `parallelize_fn` returned
    spread: called last, with the module and its layers, to spread its weights over a mesh
    Raises ModelError.
    """
    own = layers_of(part) if layers is None else layers
    switch = None if checkpointing is None else install(own, checkpointing)
    module, called = wrap(part.to(device), parallelize_fn, index)
    shards = None if spread is None else spread(module, [layer for _, layer in own])
    return Stage(index, module, call(called), switch, shards)


def own_stages(schedule: Schedule, ranks: Sequence[int]) -> list[int]:
    """The stages that these ranks host."""
    return [stage for rank in ranks for stage in schedule.placement.stages_of(rank)]


def check_names(model: nn.Module, names: Names) -> None:
    """Whether every parameter of `model` is named once. Raises PartitionError, ModelError."""
    modules = {name for name, _ in model.named_modules()}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    where: dict[str, int] = {}
    for stage, of in enumerate(names):
        for name in of:
            said = f"stage {stage} with {name!r}"
            if name not in modules and name not in parameters:
                near = difflib.get_close_matches(name, [*modules, *parameters], n=1)
                remedy = f"Did you mean {near[0]!r}?" if near else "Take it away"
                raise PartitionError(said, "the model has no such module", remedy)
            for other, place in where.items():
                if name == other or name.startswith(f"{other}.") or other.startswith(f"{name}."):
                    rule = f"stage {place} has {other!r} already, and each module stands on one stage"
                    raise PartitionError(said, rule, "Take one of them away")
            where[name] = stage
    _check_parameters(parameters, where)


def _check_parameters(parameters: dict[str, nn.Parameter], where: dict[str, int]) -> None:
    places: dict[int, tuple[str, int]] = {}
    missing = []
    for name, parameter in parameters.items():
        holders = [where[prefix] for prefix in _prefixes(name) if prefix in where]
        if not holders:
            missing.append(name)
            continue
        first, stage = places.setdefault(id(parameter), (name, holders[0]))
        if stage != holders[0]:
            raise ModelError(
                f"{first} of stage {stage} and {name} of stage {holders[0]}",
                "they are one weight, and its copies would be trained apart",
                "Put both on one stage, or untie them",
            )
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        rule = "each parameter stands on one stage"
        raise PartitionError(f"names without {', '.join(missing[:5])}{more}", rule, "Name what holds them")


def _prefixes(name: str) -> Iterator[str]:
    """a, a.b, a.b.c of a.b.c"""
    parts = name.split(".")
    yield from (".".join(parts[:end]) for end in range(1, len(parts) + 1))


def _is_module(model: nn.Module, name: str) -> bool:
    holder, last = _holder(model, name)
    return last in holder._modules


def _holder(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    before, _, last = name.rpartition(".")
    return model.get_submodule(before), last


def _take_out(holder: nn.Module, name: str) -> None:
    if isinstance(holder, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        del holder._modules[name]  # not by index: those that stay keep their numbers
    else:
        setattr(holder, name, None)


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _only_list(model: nn.Module) -> str:
    """The name of the outermost list of modules with parameters."""

    def named(kinds: Any) -> set[str]:
        return {name for name, module in model.named_modules() if isinstance(module, kinds)}

    # a dict may hold layers, and as well the parts around a list of layers
    found = named(nn.ModuleList | nn.Sequential) or named(nn.ModuleDict)
    outermost = [name for name in found if found.isdisjoint({"", *_prefixes(name)} - {name})]
    if len(outermost) != 1:
        listed = ", ".join(map(repr, sorted(outermost)[:5])) or "none"
        raise ModelError(
            f"a {type(model).__name__} with the module lists {listed}",
            "its layers are those of one list",
            'Name that one, e.g. layers="blocks"',
        )
    return outermost[0]


def _has_place(module: nn.Module) -> bool:
    """Whether a module stands on one stage: not tables, which each may read, nor lists without anything."""
    if next(module.parameters(), None) is not None:
        return True
    lists = nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict
    return next(module.buffers(), None) is None and not isinstance(module, lists)


def _around(model: nn.Module, layers: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What stands before and after the list, from the outermost module inwards, and back.

    What is called once and had no place would be called on every stage: an activation, say.
    """
    before: list[str] = []
    after: list[str] = []
    holder, prefix = model, ""
    for part in layers.split(".") if layers else ():
        before += [prefix + name for name, _ in holder.named_parameters(recurse=False)]
        held = {name for name, child in holder.named_children() if _has_place(child)}
        children = [name for name, _ in holder.named_children() if name in held or name == part]
        at = children.index(part)
        before += [prefix + name for name in children[:at]]
        after = [*(prefix + name for name in children[at + 1 :]), *after]
        holder, prefix = holder.get_submodule(part), f"{prefix}{part}."
    return tuple(before), tuple(after)
