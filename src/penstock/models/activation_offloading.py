"""Activation offloading: which layers and modules of a stage move their activations to host memory.

    modules=()            all tensors that autograd saves in a layer
    modules=("mlp",)      tensors that it saves in the layer's module `mlp`, such as the module's input
    modules=("*norm*",)   tensors that it saves in modules of the layer whose name matches

A layer that runs again in the backward saves only its inputs: these are offloaded, whatever `modules` says.
Tensors with other users stay on the device: weights, buffers, and inputs of the stage.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from penstock.errors import ConfigError
from penstock.models.activation_checkpointing import Checkpointing
from penstock.options import OffloadingOptions
from penstock.runtime.around import around, is_around
from penstock.runtime.device.offload import Offload
from penstock.runtime.split_backward.modules import is_compiled
from penstock.schedule import Schedule
from penstock.schedule.offload import host_copies, offloaded


@dataclass(frozen=True)
class Offloading(OffloadingOptions):
    """Which activations are offloaded to host memory: `OffloadingOptions`. Raises ConfigError."""

    def __post_init__(self) -> None:
        if isinstance(self.modules, list):  # from a config; a tuple can be hashed and compared
            object.__setattr__(self, "modules", tuple(self.modules))
        if not isinstance(self.modules, tuple):  # a string is a sequence, too
            rule = "it lists names of modules within a layer"
            raise refusal("modules", self.modules, rule, f"Write modules=({self.modules!r},)")
        for name, least in (("layers", 1), ("ahead", 1), ("min_bytes", 0)):
            value = getattr(self, name)
            if name == "layers" and value is None:
                continue
            if type(value) is not int or value < least:
                raise refusal(name, value, f"it is a whole number from {least} on", f"Give {least} or more")


def offloading(option: object) -> Offloading | None:
    """The option `activation_offloading` in any of its forms, as Offloading. Raises ConfigError."""
    if isinstance(option, Offloading):
        return option
    if option is None or option is False:
        return None
    if option is True:
        return Offloading()
    rule = "it is true or false, or an Offloading"
    raise ConfigError(f"activation_offloading={option!r}", rule, "Take True for whole layers")


def refusal(field: str, value: object, rule: str, remedy: str) -> ConfigError:
    return ConfigError(f"activation_offloading.{field}={value!r}", rule, remedy)


def check_schedule(options: Offloading, schedule: Schedule, checkpointing: Checkpointing | None) -> None:
    """Raise ConfigError if no activation would be offloaded."""
    if not offloaded(host_copies(schedule, options.ahead)):
        raise ConfigError(
            f"activation_offloading with schedule {schedule.name!r}, {schedule.ranks} ranks and "
            f"{schedule.microbatches} microbatches",
            "between the forward and the backward of each microbatch its rank has fewer than "
            f"{2 * options.ahead + 1} other ops, so activations would return before they have left",
            "Leave it out, or take more ranks or microbatches, or a schedule with more live activations",
        )
    if checkpointing is None or checkpointing.every > 1 or not options.modules:
        return
    if checkpointing.in_flight is checkpointing.memory_limit is None:
        raise refusal(
            "modules", options.modules, "every layer runs again, and saves nothing but its inputs",
            "Leave modules out, and the layers' inputs are offloaded",
        )  # fmt: skip


def check_modules(options: Offloading, layers: Iterable[nn.Module]) -> None:
    """Raise ConfigError for a name that no module of any layer has."""
    check_names(options, names_in(layers))


def names_in(layers: Iterable[nn.Module]) -> set[str]:
    """The names of modules within these layers."""
    return {name for layer in layers for name, _ in layer.named_modules() if name}


def check_names(options: Offloading, names: Collection[str]) -> None:
    """Raise ConfigError for a name that is not in `names`, those of the modules of all layers."""
    for wanted in options.modules:
        if not any(fnmatchcase(name, wanted) for name in names):
            outer = sorted(name for name in names if "." not in name)
            rule = f"no layer has a module of that name; they have {', '.join(outer) or 'none'}"
            raise refusal("modules", wanted, rule, "Name modules of a layer, such as mlp or self_attn.q_proj")


def _offloaded(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Tensors that autograd saves during a call of the module, with its hooks, may leave the device."""

    def call(module: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() or not module._offload.records:
            return plain(module, *args, **kwargs)
        with module._offload.saving():
            return plain(module, *args, **kwargs)

    return call


def install(layers: Sequence[nn.Module], options: Offloading, offload: Offload) -> None:
    """Offload the activations of a stage's layers, in place. layers: in the order in which they run"""
    for layer in layers[: options.layers]:
        for module in _chosen(layer, options):
            around(module, __call__=_offloaded)
            vars(module)["_offload"] = offload


def _chosen(layer: nn.Module, options: Offloading) -> Iterator[nn.Module]:
    if not options.modules:
        yield layer
    for name, module in layer.named_modules():
        if name and any(fnmatchcase(name, wanted) for wanted in options.modules):
            yield module


def check_compiled(stage: nn.Module) -> None:
    """Raise ConfigError where a compiled module contains a chosen one."""
    for name, outer in stage.named_modules():
        within = outer.named_modules() if is_compiled(outer) else ()
        chosen = [inner for inner, part in within if part is not outer and is_around(_offloaded, part)]
        if chosen:
            raise ConfigError(
                f"activation_offloading of {chosen[0]} within {name or 'the stage'}, which is compiled",
                "a compiler saves tensors in its own way, and hides the modules inside",
                "Compile each layer by itself, and offload whole layers",
            )
