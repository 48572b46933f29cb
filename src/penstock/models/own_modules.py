"""The modules of a model of the user's own, by name: which ones there are, and stages said by them."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from penstock.errors import ModelError, PartitionError
from penstock.models.named_modules import ModuleNames

Names = Sequence[Sequence[str]]  # for each stage, of the modules that it holds


def own_names(model: nn.Module, layers: str | None) -> ModuleNames:
    """The modules in the order in which they were assigned.

    layers: the name of the list of the layers; None where there is but one
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
