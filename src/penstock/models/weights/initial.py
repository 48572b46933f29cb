"""Initial values: what parameters and buffers without any get from the model's own initialisation.

They hang on the seed and the parameter's own name, so they are the same whatever the split.
"""

from __future__ import annotations

import copy
import functools
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.initialization import guard_torch_init_functions

from penstock.errors import ModelError
from penstock.models.huggingface.boundary import Absent
from penstock.models.tracing.meta import Passing, Table
from penstock.models.tracing.placeholder import Placeholder
from penstock.models.weights.files import Ties, holds
from penstock.runtime.sharded_weights import spread_like

# ---- Which modules' initialisations have to do with the same tensors, found out without values.
#
#     attention.c_proj      fills its weight        \
#     attention             fills that weight anew   }  one piece: the weight is there until both have run
#     mlp.c_fc              fills its weight            another: by then the first one's is passed on


class Place(NamedTuple):
    """Where a tensor stands: in a module's table, under a name there; full: its name in the model."""

    table: Table
    name: str
    full: str


@dataclass(frozen=True)
class Empty:
    """A tensor on the meta device, which is the same in all of its places."""

    tensor: Tensor
    places: list[Place]


class Call(NamedTuple):
    """A module's initialisation."""

    module: nn.Module
    run: Callable[[], None]


@dataclass(frozen=True)
class Piece:
    """Tensors by their identity, and the calls that have to do with them by their number among all."""

    tensors: set[int]
    calls: dict[int, Call]

    @property
    def in_order(self) -> list[Call]:
        return [call for _, call in sorted(self.calls.items())]


def all_empty(module: nn.Module) -> dict[int, Empty]:
    """All tensors on the meta device, by their identity."""
    found: dict[int, Empty] = {}
    for prefix, owner in module.named_modules():
        for table in (owner._parameters, owner._buffers):
            for name, value in table.items():
                if value is not None and value.is_meta:
                    place = Place(table, name, f"{prefix}.{name}" if prefix else name)
                    found.setdefault(id(value), Empty(value, [])).places.append(place)
    return found


def pieces(calls: Sequence[Call], seen: set[int], tensors: Collection[int]) -> list[Piece]:
    """What has to do with a common one of `tensors` goes together.

    Each call is made without values; seen: where the model's tables note what is read of them. To read is
    taken for more than ops on the meta device would tell: some of torch's initialisations do none there.
    """
    homes: dict[int, Piece] = {}
    for number, call in enumerate(calls):
        piece = Piece(_used(call, seen) & set(tensors), {number: call})
        for other in {id(homes[key]): homes[key] for key in piece.tensors if key in homes}.values():
            piece.tensors.update(other.tensors)
            piece.calls.update(other.calls)
        homes |= dict.fromkeys(piece.tensors, piece)
    return list({id(piece): piece for piece in homes.values()}.values())


def _used(call: Call, seen: set[int]) -> set[int]:
    seen.clear()
    try:
        call.run()
    except Exception:  # it needs values, and may go on to anything it holds; what else fails will fail again
        _read(call.module.parameters(), call.module.buffers())
    _read(call.module._parameters.values(), call.module._buffers.values())
    return set(seen)


def _read(*tables: Any) -> None:
    for table in tables:
        for _ in table:
            pass


@torch.no_grad()
def initialise(stage: PreTrainedModel, whole: PreTrainedModel, ties: Ties, seed: int) -> None:
    """Give values to what is still on the meta device, the same ones whatever else the stage holds.

    stage: one that is `outlined` passes its values on, and holds no more at a time than what one module's
        initialisation fills, most often a tensor
    whole: the unsplit model; a tied weight gets the values of the module it is saved by.
    Raises ModelError where the model's own initialisation leaves something out.
    """
    empty = all_empty(stage)
    if not empty:
        return
    fresh = {place.full for each in empty.values() for place in each.places}
    calls = [
        Call(module, functools.partial(_init_module, owner, name, module, seed))
        for owner, name, module in _inside_out(stage, stage, "")
    ]
    with torch.random.fork_rng(devices=[]), _kept(stage, fresh):
        with _own_only(stage), guard_torch_init_functions():  # torch's own would not heed what is marked
            if isinstance(stage._parameters, Passing):
                _init_in_pieces(stage, calls, stage._parameters.seen, empty, ties)
            else:
                made = _materialise(empty.values())
                for call in calls:
                    call.run()
                _give(stage, made, ties)
        _init_tied(stage, whole, ties, seed, fresh)


def _init_in_pieces(
    stage: nn.Module, calls: Sequence[Call], seen: set[int], empty: dict[int, Empty], ties: Ties
) -> None:
    others = set(empty)  # what no call may need but those of its piece, before and after it has its values

    def run(piece: Piece) -> None:  # by itself, so that nothing is left of it when the next one begins
        made = _materialise(empty[tensor] for tensor in piece.tensors)
        seen.clear()
        for call in piece.in_order:
            call.run()
        if not seen.isdisjoint(others):
            raise ModelError(
                f"{type(stage).__name__}, whose _init_weights reads more where there are values",
                "what it reads is found out on the meta device, so that it need not all be there at once",
                "Build the pipeline from a model object that has its values, or load a checkpoint",
            )
        _give(stage, made, ties)
        others.update(id(dict.__getitem__(place.table, place.name)) for place, _ in made)

    for piece in pieces(calls, seen, empty):
        run(piece)


def _materialise(empty: Iterable[Empty]) -> list[tuple[Place, Tensor]]:
    """Give real storage, filled with NaN, to tensors on the meta device."""
    made = []
    for value, places in ((each.tensor, each.places) for each in empty):
        filled = torch.empty(value.shape, dtype=value.dtype)
        filled = filled.fill_(float("nan")) if value.is_floating_point() else filled.zero_()
        filled = nn.Parameter(filled, value.requires_grad) if isinstance(value, nn.Parameter) else filled
        for place in places:
            dict.__setitem__(place.table, place.name, filled)  # here, even where it is to be passed on
            made.append((place, filled))
    return made


def _give(stage: nn.Module, made: Sequence[tuple[Place, Tensor]], ties: Ties) -> None:
    """Pass on what has been filled. Raises ModelError for what has not."""
    tied = {name for names in ties for name in names}  # filled by the module they are saved by, later
    for place, value in made:
        if place.full not in tied and value.is_floating_point() and value.isnan().any():
            raise _unfilled(stage, place.full)
        place.table[place.name] = value


def _unfilled(stage: nn.Module, name: str) -> ModelError:
    return ModelError(
        f"{type(stage).__name__}: {name}",
        "the model's _init_weights gives it no value",
        "Build the pipeline from a model object that has its values, or load a checkpoint",
    )


def _inside_out(
    owner: PreTrainedModel, module: nn.Module, name: str
) -> Iterator[tuple[PreTrainedModel, str, nn.Module]]:
    """Every module after those in it, with the model whose initialisation it takes."""
    owner = module if isinstance(module, PreTrainedModel) else owner
    for child, inner in module.named_children():
        yield from _inside_out(owner, inner, f"{name}.{child}" if name else child)
    yield owner, name, module


@contextmanager
def _kept(stage: nn.Module, fresh: set[str]) -> Iterator[None]:
    """Mark what has values already, in the way that transformers' initialisers leave alone."""
    values = [*stage.named_parameters(), *stage.named_buffers()]
    marked = [value for name, value in values if name not in fresh]
    for value in marked:
        value._is_hf_initialized = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for value in marked:
            del value._is_hf_initialized  # type: ignore[attr-defined]


@contextmanager
def _own_only(stage: nn.Module) -> Iterator[None]:
    """Some models' initialisers look into all their layers, or into a head: show them no stand-ins.

    Those of layers are taken out of their lists, and in place of the others stand the modules without values.
    """
    changed = []
    for module in stage.modules():
        if any(isinstance(child, Placeholder | Absent) for child in module._modules.values()):
            changed.append((module, module._modules))
            in_list = isinstance(module, nn.ModuleList)
            module._modules = {
                name: child._module if isinstance(child, Absent) else child
                for name, child in module._modules.items()
                if not (in_list and isinstance(child, Placeholder))
            }
    try:
        yield
    finally:
        for module, children in changed:
            module._modules = children


def _init_module(owner: PreTrainedModel, name: str, module: nn.Module, seed: int) -> None:
    # not torch.manual_seed, which seeds every kind of device: that took most of a deep model's build
    torch.default_generator.manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
    owner._init_weights(module)


def _init_tied(
    stage: PreTrainedModel, whole: PreTrainedModel, ties: Ties, seed: int, fresh: set[str]
) -> None:
    """A tied weight has the values that it gets under the name that it is saved by, wherever it stands."""
    for names in ties:
        for name in names:
            if holds(stage, name) and name in fresh:
                owner, _, last = names[0].rpartition(".")
                source = _alone(whole, owner)
                _init_module(whole, owner, source, seed)
                value, held = source.get_parameter(last), stage.get_parameter(name)
                if value.is_floating_point() and value.isnan().any():
                    raise _unfilled(stage, name)
                held.copy_(spread_like(value, held))


def _alone(whole: PreTrainedModel, name: str) -> nn.Module:
    """The module `name` of `whole`, by itself and with storage."""
    module: nn.Module = copy.deepcopy(whole.get_submodule(name))
    _materialise(all_empty(module).values())
    return module
