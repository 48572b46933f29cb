"""Split a user's own module, which calls its modules one after the other, into stages.

    names    = names_per_stage(model, stages=4)     which modules each stage holds
    module   = split(model, names, stage=0)         a copy of the model with only these
    provider = provider_of(model, names)            both, for Pipeline.from_provider

    pipe = Pipeline.from_provider(provider, schedule="1f1b", ranks=4, microbatches=8)

Only modules are divided. Arithmetic in the model's own forward between them (a scale, a residual, a skip)
would run on every stage; `pipe.verify_against(model, batch)` detects it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from penstock.errors import ModelError, PartitionError
from penstock.models.module_names import ModuleNames, Names, check_names, names_in_order
from penstock.models.split.balanced_split import LayerCosts
from penstock.models.split.partition import partition
from penstock.models.stage import Provider, StageInfo, numbered_layers
from penstock.models.tracing.chain import find_chain
from penstock.options import SplitOptions


def module_names(model: nn.Module, layers: str | None = None) -> ModuleNames:
    """The names of the model's modules before, in and after its layers, in the order in which they run.

    For a transformers model, the order is known. For any other, it is the order of assignment, and its layers
    are those of its only ModuleList, ModuleDict or Sequential. Modules without parameters (activations,
    dropout) are included; modules with only buffers (tables of positions) are not, as every stage has them.

    Args:
        layers: name of the list of layers, if there are several lists; "" for the model itself

    Raises ModelError.
    """
    if isinstance(model, PreTrainedModel):
        return ModuleNames.of(find_chain(model))
    return names_in_order(model, layers)


def names_per_stage(
    model: nn.Module,
    stages: int,
    *,
    layers: str | None = None,
    balance: LayerCosts | Sequence[float] | None = None,
    on_every_stage: Sequence[str] = (),
    **description: Any,
) -> list[tuple[str, ...]]:
    """The names of the modules that each stage holds.

    Layers are divided evenly, or by one description. Modules before the layers are on the first stage,
    modules after them on the last.

    Args:
        layers: see `module_names`
        balance: cost of each layer
        on_every_stage: modules and parameters that `split` keeps on every stage; the result omits them
        description: keywords of penstock.options.SplitOptions, such as layout="Ett|ttL"

    Raises ModelError, PartitionError, ConfigError; TypeError for an unknown keyword.
    """
    before, inside, after = module_names(model, layers)
    kept = set(on_every_stage)
    names = ModuleNames(
        *(tuple(name for name in side if name not in kept) for side in (before, inside, after))
    )
    ranges = partition(len(names.layers), stages, SplitOptions(**description), balance=balance)
    return names.per_stage(ranges)


class SkippedModule(nn.Module):
    """Replaces a module of another stage. Returns its first argument."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return next(iter((*args, *kwargs.values())), None)


def split(
    model: nn.Module,
    names: Names,
    stage: int,
    *,
    absent: Literal["identity", "none"] = "identity",
    on_every_stage: Sequence[str] = (),
) -> nn.Module:
    """Copy the modules of one stage; `model` is not changed.

    Modules of other stages are never copied. On the meta device (`torch.device("meta")`) no value is copied.

    Args:
        names: by stage, the names of its modules, and of parameters outside any named module. Each parameter
            of the model is named once. Unnamed modules without parameters are on every stage.
        absent: stand-in for modules of other stages. "identity" returns its first argument, which suits a
            forward that calls one module after the other. "none" is None; lists and dicts lose these
            modules, and the rest keep their names.
        on_every_stage: names of modules and parameters of which each stage has a copy, such as a table that
            all layers use. The copies are one weight: a step sums their gradients.

    Raises PartitionError for names that do not fit the model, ModelError for a weight on two stages.
    """
    if isinstance(model, PreTrainedModel):
        raise ModelError(
            f"split() of a {type(model).__name__}",
            "a transformers model keeps its own forward, which needs more than its modules",
            "Use AutoPipeline(modules_per_stage=names).build(model)",
        )
    check_names(model, names, on_every_stage)
    kept = set(names[stage])
    others = [name for of_stage in names for name in of_stage if name not in kept]
    modules = {name for name in others if _is_module(model, name)}
    memo: dict[int, Any] = {
        id(model.get_submodule(name)): SkippedModule() for name in others if name in modules
    }
    for name in others:
        if name not in modules:
            memo[id(model.get_parameter(name))] = nn.Parameter(torch.empty(0), requires_grad=False)
    if torch.get_default_device().type == "meta":
        memo |= {id(tensor): _without_values(tensor) for tensor in (*model.parameters(), *model.buffers())}
    copied = copy.deepcopy(model, memo)
    for name in others:
        holder, last = _holder(copied, name)
        if name not in modules:
            holder._parameters[last] = None
        elif absent == "none":
            _remove(holder, last)
    if on_every_stage:
        vars(copied)["on_every_stage"] = tuple(on_every_stage)  # see declared_on_every_stage
    return copied


def provider_of(
    model: nn.Module,
    names: Names,
    *,
    absent: Literal["identity", "none"] = "identity",
    on_every_stage: Sequence[str] = (),
) -> Provider:
    """A provider for Pipeline.from_provider that splits `model`. Arguments and errors are as in `split`."""
    check_names(model, names, on_every_stage)

    def provider(info: StageInfo) -> nn.Module:
        if info.stages != len(names):
            raise PartitionError(
                f"names of {len(names)} stages",
                f"the schedule has {info.stages}",
                f"Give {info.stages} lists",
            )
        return split(model, names, info.stage, absent=absent, on_every_stage=on_every_stage)

    return provider


def layers_of(module: nn.Module) -> list[tuple[int, nn.Module]]:
    """The layers of a stage's module, with their indices in the whole model."""
    return [
        (number, layer) for number, layer in numbered_layers(module) if not isinstance(layer, SkippedModule)
    ]


def _is_module(model: nn.Module, name: str) -> bool:
    holder, last = _holder(model, name)
    return last in holder._modules


def _holder(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    before, _, last = name.rpartition(".")
    return model.get_submodule(before), last


def _remove(holder: nn.Module, name: str) -> None:
    if isinstance(holder, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        del holder._modules[name]  # not by index, so that the rest keep their names
    else:
        setattr(holder, name, None)


def _without_values(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
