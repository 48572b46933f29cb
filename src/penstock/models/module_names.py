"""Stages by the names of their modules: the modules of a model to assign, and checks of their names.

names  = ModuleNames(("embed",), ("layers.0", "layers.1"), ("norm", "head"))
stages = names.per_stage([range(1), range(1, 2)])     # [("embed", "layers.0"), ("layers.1", "norm", "head")]
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from torch import nn

from penstock.errors import ModelError, PartitionError
from penstock.models.split.balanced_split import ranges
from penstock.models.tracing.chain import Chain, prefixes

Names = Sequence[Sequence[str]]  # for each stage, its modules


class ModuleNames(NamedTuple):
    """The modules with parameters in the order in which they run: before, in and after the layer list."""

    before: tuple[str, ...]
    layers: tuple[str, ...]
    after: tuple[str, ...]

    @classmethod
    def of(cls, chain: Chain) -> ModuleNames:
        layers = tuple(f"{chain.layers}.{index}" for index in range(chain.count))
        return cls(tuple(chain.before), layers, tuple(chain.after))

    def on_stage(self, layers: range, first: bool, last: bool) -> tuple[str, ...]:
        """The modules of one stage with these layers."""
        names = self.layers[layers.start : layers.stop]
        return (*(self.before if first else ()), *names, *(self.after if last else ()))

    def per_stage(self, split: Sequence[range]) -> list[tuple[str, ...]]:
        """The modules of each stage. split: the layers of each stage"""
        last = len(split) - 1
        return [self.on_stage(layers, stage == 0, stage == last) for stage, layers in enumerate(split)]


def named_split(named: Names, stages: int, modules: ModuleNames, known: Mapping[str, bool]) -> list[range]:
    """The layers of each stage, from the names of all its modules.

    Args:
        named: for each stage the names, such as model.embed_tokens, model.layers.0, lm_head. Every module
            with parameters occurs once, and layers are in order.
        stages: number of stages of the schedule.
        modules: the modules of the model that must be assigned.
        known: every module of the model, and whether it has parameters. Modules without parameters (rotary
            tables) are on every stage: they may be named anywhere, or nowhere.

    Raises PartitionError with the wrong name.
    """
    if len(named) != stages:
        value = f"modules_per_stage with {len(named)} stages"
        raise PartitionError(value, f"the schedule has {stages}", f"Give {stages} lists")
    before, layers, after = modules
    order = [*before, *layers, *after]
    for stage, names in enumerate(named):
        for name in names:
            if name not in order:
                _check_other(f"modules_per_stage[{stage}] with {name!r}", name, modules, known)
    placed = [[name for name in names if name in order] for names in named]
    where = _stage_of_each(placed, order, "modules_per_stage")
    if missing := [name for name in order if name not in where]:
        raise _without("modules_per_stage", missing, "each module with parameters is on one stage")
    for at_the_end, stage, rule in (
        (before, 0, "it runs before the layers, so it is on the first stage"),
        (after, stages - 1, "it runs after the layers, so it is on the last stage"),
    ):
        for name in at_the_end:
            if where[name] != stage:
                raise _misplaced(name, where[name], rule, stage)
    for earlier, later in pairwise(layers):
        if where[later] < where[earlier]:
            rule = f"{earlier} runs before it and is on stage {where[earlier]}"
            raise _misplaced(later, where[later], rule, where[earlier])
    return ranges([sum(where[layer] == stage for layer in layers) for stage in range(stages)])


def check_names(model: nn.Module, named: Names, on_every_stage: Sequence[str] = ()) -> None:
    """Check that `named` assigns every parameter of `model` to one stage, except those on every stage.

    named: for each stage the names of modules or parameters
    Raises PartitionError, and ModelError for a weight that two stages would have.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    known = [*dict(model.named_modules(remove_duplicate=False)), *parameters]
    kept = _stage_of_each([on_every_stage], known, "on_every_stage")
    where = _stage_of_each(named, known, "names")
    for name in kept:
        for other in where:
            if name == other or is_inside(name, other) or is_inside(other, name):
                value = f"names[{where[other]}] with {other!r}"
                rule = f"on_every_stage has {name!r}, and one module is on one stage or on every one"
                raise PartitionError(value, rule, "Take one of them away")
    everywhere = {id(parameters[name]) for name in parameters if not kept.keys().isdisjoint(prefixes(name))}
    places: dict[int, tuple[str, int]] = {}
    missing = []
    for name, parameter in parameters.items():
        if id(parameter) in everywhere:
            continue
        holder = next((prefix for prefix in prefixes(name) if prefix in where), None)
        if holder is None:
            missing.append(name)
            continue
        first, stage = places.setdefault(id(parameter), (name, where[holder]))
        if stage != where[holder]:
            raise ModelError(
                f"{first} of stage {stage} and {name} of stage {where[holder]}",
                "they are one weight, and its copies would be trained separately",
                "Put both on one stage, or untie them",
            )
    if missing:
        raise _without("names", missing, "each parameter is on one stage")


def _stage_of_each(named: Names, known: Collection[str], option: str) -> dict[str, int]:
    """The stage of each name. Raises PartitionError for an unknown name, and for one module on two stages."""
    where: dict[str, int] = {}
    for stage, names in enumerate(named):
        for name in names:
            value = f"{option}[{stage}] with {name!r}"
            if name not in known:
                raise _unknown(value, name, known)
            for other, its_stage in where.items():
                if name == other or is_inside(name, other) or is_inside(other, name):
                    already = "it" if other == name else repr(other)
                    rule = f"stage {its_stage} has {already} already, and each module is on one stage"
                    raise PartitionError(value, rule, "Take one of them away")
            where[name] = stage
    return where


def _check_other(value: str, name: str, modules: ModuleNames, known: Mapping[str, bool]) -> None:
    """Refuse a module that is not one of `modules`, except those that are on every stage."""
    order = [*modules.before, *modules.layers, *modules.after]
    if name not in known:
        layers = modules.layers[-1].rpartition(".")[0] if modules.layers else ""
        if is_inside(name, layers) and name.rpartition(".")[2].isdigit():
            raise PartitionError(value, f"the model's last layer is {modules.layers[-1]}", "Remove it")
        raise _unknown(value, name, [*order, *known])
    around = next((other for other in order if is_inside(name, other)), None)
    if around is not None:
        raise PartitionError(value, f"it is a part of {around}, which stays together", f"Name {around}")
    if known[name]:
        inside = next((other for other in order if is_inside(other, name)), "modules in it")
        raise PartitionError(value, "it has modules of several stages", f"Name each, such as {inside}")


def _unknown(value: str, name: str, known: Collection[str]) -> PartitionError:
    near = difflib.get_close_matches(name, known, n=1)
    remedy = f"Did you mean {near[0]!r}?" if near else f"The modules are {', '.join([*known][:3])}, ..."
    return PartitionError(value, "the model has no such module", remedy)


def _misplaced(name: str, stage: int, rule: str, right: int) -> PartitionError:
    return PartitionError(f"modules_per_stage[{stage}] with {name!r}", rule, f"Move it to stage {right}")


def _without(option: str, missing: Sequence[str], rule: str) -> PartitionError:
    more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
    value = f"{option} without {', '.join(missing[:5])}{more}"
    return PartitionError(value, rule, "Name it" if len(missing) == 1 else "Name them")


def is_inside(name: str, other: str) -> bool:
    """Whether the module `name` is inside the module `other`."""
    return name.startswith(f"{other}.")


# ---- Models that are not from transformers: their modules in the order of assignment


def names_in_order(model: nn.Module, layers: str | None) -> ModuleNames:
    """The modules in the order of assignment, which is assumed to be the order in which they run.

    layers: the name of the list of the layers; None if there is only one list
    Raises ModelError.
    """
    name = _only_list(model) if layers is None else layers
    try:
        listed = model.get_submodule(name)
    except AttributeError as cause:
        raise ModelError(f"layers={name!r}", "the model has no such module", "Name its list") from cause
    prefix = f"{name}." if name else ""
    before, after = _around(model, name)
    return ModuleNames(before, tuple(prefix + child for child, _ in listed.named_children()), after)


def _only_list(model: nn.Module) -> str:
    """The name of the outermost list of modules with parameters."""

    def named(kinds: Any) -> set[str]:
        return {name for name, module in model.named_modules() if isinstance(module, kinds)}

    # a dict may contain layers, or the modules around a list of layers
    candidates = named(nn.ModuleList | nn.Sequential) or named(nn.ModuleDict)
    outermost = [name for name in candidates if candidates.isdisjoint({"", *prefixes(name)} - {name})]
    if len(outermost) != 1:
        listed = ", ".join(map(repr, sorted(outermost)[:5])) or "none"
        raise ModelError(
            f"a {type(model).__name__} with the module lists {listed}",
            "its layers are in one list",
            'Name that list, e.g. layers="blocks"',
        )
    return outermost[0]


def _has_place(module: nn.Module) -> bool:
    """Whether a module is on one stage. Tables, which every stage may read, and empty lists are not."""
    if next(module.parameters(), None) is not None:
        return True
    lists = nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict
    return next(module.buffers(), None) is None and not isinstance(module, lists)


def _around(model: nn.Module, layers: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The modules before and after the list of layers, from the outermost module inwards and back.

    Modules without parameters, such as activations, are included: otherwise every stage would call them.
    """
    before: list[str] = []
    after: list[str] = []
    holder, prefix = model, ""
    for step in layers.split(".") if layers else ():
        before += [prefix + name for name, _ in holder.named_parameters(recurse=False)]
        names = [name for name, child in holder.named_children() if name == step or _has_place(child)]
        at = names.index(step)
        before += [prefix + name for name in names[:at]]
        after = [*(prefix + name for name in names[at + 1 :]), *after]
        holder, prefix = holder.get_submodule(step), f"{prefix}{step}."
    return tuple(before), tuple(after)
