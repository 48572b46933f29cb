"""The names of a model's modules in the order in which they run, and stages said by them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from torch import nn

from penstock.errors import ModelError, PartitionError
from penstock.models.tracing.chain import Chain


class ModuleNames(NamedTuple):
    """Of the modules with parameters; before, after: those that run before and after the layers"""

    before: tuple[str, ...]
    layers: tuple[str, ...]
    after: tuple[str, ...]

    @classmethod
    def of(cls, chain: Chain) -> ModuleNames:
        return cls(
            tuple(chain.before), tuple(f"{chain.layers}.{i}" for i in range(chain.count)), tuple(chain.after)
        )

    def of_stage(self, layers: range, first: bool, last: bool) -> tuple[str, ...]:
        """What a stage with these layers holds; what runs before the layers is on the first stage."""
        own = self.layers[layers.start : layers.stop]
        return (*(self.before if first else ()), *own, *(self.after if last else ()))

    def per_stage(self, shares: Sequence[range]) -> list[tuple[str, ...]]:
        """shares: the layers of each stage"""
        last = len(shares) - 1
        return [self.of_stage(layers, stage == 0, stage == last) for stage, layers in enumerate(shares)]


def named_split(
    modules: Sequence[Sequence[str]], stages: int, names: ModuleNames, known: Mapping[str, bool]
) -> list[range]:
    """The layers of each stage, from the names of all modules that each holds.

    modules: for each stage the names, such as model.embed_tokens, model.layers.0, lm_head; every module that
        has parameters stands there once, a later layer on no earlier stage
    known: every module of the model, and whether it has parameters. Those without (rotary tables) are on
        every stage: they may be named anywhere, or nowhere.

    Raises PartitionError with the name at fault.
    """
    if len(modules) != stages:
        raise PartitionError(
            f"modules_per_stage with {len(modules)} stages",
            f"the schedule has {stages}",
            f"Give {stages} lists",
        )
    before, layers, after = names
    order = [*before, *layers, *after]
    where = _places(modules, order, known)
    missing = [name for name in order if name not in where]
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise PartitionError(
            f"modules_per_stage without {', '.join(missing[:5])}{more}",
            "each module with parameters stands on one stage",
            "Name it" if len(missing) == 1 else "Name them",
        )
    for at_the_end, stage, rule in (
        (before, 0, "it runs before the layers, so the first stage holds it"),
        (after, stages - 1, "it runs after the layers, so the last stage holds it"),
    ):
        for name in at_the_end:
            if where[name] != stage:
                raise _misplaced(name, where[name], rule, stage)
    for earlier, later in pairwise(layers):
        if where[later] < where[earlier]:
            rule = f"{earlier} runs before it and is on stage {where[earlier]}"
            raise _misplaced(later, where[later], rule, where[earlier])
    held = [sum(where[layer] == stage for layer in layers) for stage in range(stages)]
    return [range(sum(held[:stage]), sum(held[: stage + 1])) for stage in range(stages)]


def _misplaced(name: str, stage: int, rule: str, right: int) -> PartitionError:
    return PartitionError(f"modules_per_stage[{stage}] with {name!r}", rule, f"Move it to stage {right}")


def _places(
    modules: Sequence[Sequence[str]], order: Sequence[str], known: Mapping[str, bool]
) -> dict[str, int]:
    """The stage of each module in `order` that is named."""
    where: dict[str, int] = {}
    for stage, names in enumerate(modules):
        for name in names:
            if name in where:
                raise PartitionError(
                    f"modules_per_stage[{stage}] with {name!r}",
                    f"stage {where[name]} has it already, and each module stands on one stage",
                    "Take one of them away",
                )
            if name in order:
                where[name] = stage
            elif known.get(name, True) or any(_part_of(name, whole) for whole in order):
                raise _unknown(name, stage, order, known)
    return where


def _part_of(name: str, whole: str) -> bool:
    return name.startswith(f"{whole}.")


def _unknown(name: str, stage: int, order: Sequence[str], known: Mapping[str, bool]) -> PartitionError:
    value = f"modules_per_stage[{stage}] with {name!r}"
    whole = next((whole for whole in order if _part_of(name, whole)), None)
    if whole is not None and name in known:
        return PartitionError(value, f"it is a part of {whole}, which stays together", f"Name {whole}")
    if name in known:
        inside = next((inner for inner in order if _part_of(inner, name)), "modules in it")
        return PartitionError(value, "it holds modules of several stages", f"Name each, such as {inside}")
    number = re.fullmatch(r"(.+)\.\d+", name)
    if number is not None and any(_part_of(known_name, number[1]) for known_name in order):
        last = [known_name for known_name in order if _part_of(known_name, number[1])][-1]
        return PartitionError(value, f"the model's last layer is {last}", "Take it away")
    near = difflib.get_close_matches(name, [*order, *known], n=1)
    remedy = f"Did you mean {near[0]!r}?" if near else f"The modules are {', '.join(order[:3])}, ..."
    return PartitionError(value, "the model has no such module", remedy)


# ---- The modules of a model of the user's own, by name: which ones there are, and stages said by them.


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
