"""Initial values: what parameters and buffers without any get from the model's own initialisation.

They hang on the seed and the parameter's own name, so they are the same whatever the split.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.initialization import guard_torch_init_functions

from penstock.errors import ModelError
from penstock.models.doors import Absent, Placeholder
from penstock.models.weights import Ties, holds


@torch.no_grad()
def initialise(stage: PreTrainedModel, whole: PreTrainedModel, ties: Ties, seed: int) -> None:
    """Give values to what is still on the meta device, the same ones whatever else the stage holds.

    whole: the unsplit model on the meta device; a tied weight gets the values of the module it is saved by.
    Raises ModelError where the model's own initialisation leaves something out.
    """
    fresh = _materialise(stage)
    if not fresh:
        return
    modules = list(_inside_out(stage, stage, ""))
    with torch.random.fork_rng(devices=[]), _kept(stage, fresh):
        with _own_only(stage), guard_torch_init_functions():  # torch's own would not heed what is marked
            for owner, name, module in modules:
                _init_module(owner, name, module, seed)
        _init_tied(stage, whole, ties, seed, fresh)
    values = {**dict(stage.named_parameters(remove_duplicate=False)), **dict(stage.named_buffers())}
    for name in fresh:
        if values[name].is_floating_point() and values[name].isnan().any():
            raise ModelError(
                f"{type(stage).__name__}: {name}",
                "the model's _init_weights gives it no value",
                "Build the pipeline from a model object that has its values, or load a checkpoint",
            )


def _materialise(module: nn.Module) -> set[str]:
    """Give real storage, filled with NaN, to all that is on the meta device; return its names."""
    made: dict[int, Tensor] = {}
    fresh = set()
    for prefix, owner in module.named_modules():
        for kind in (owner._parameters, owner._buffers):
            for name, value in kind.items():
                if value is None or not value.is_meta:
                    continue
                if id(value) not in made:
                    empty = torch.empty(value.shape, dtype=value.dtype)
                    empty = empty.fill_(float("nan")) if value.is_floating_point() else empty.zero_()
                    is_parameter = isinstance(value, nn.Parameter)
                    made[id(value)] = nn.Parameter(empty, value.requires_grad) if is_parameter else empty
                kind[name] = made[id(value)]
                fresh.add(f"{prefix}.{name}" if prefix else name)
    return fresh


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
                owner = names[0].rpartition(".")[0]
                source = _alone(whole, owner)
                _init_module(whole, owner, source, seed)
                stage.get_parameter(name).copy_(source.get_parameter(names[0].rpartition(".")[2]))


def _alone(whole: PreTrainedModel, name: str) -> nn.Module:
    """The module `name` of `whole`, by itself and with storage."""
    module: nn.Module = copy.deepcopy(whole.get_submodule(name))
    _materialise(module)
    return module
