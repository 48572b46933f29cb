"""Activation offloading: which layers and modules of a stage leave their activations to host memory.

    modules=()            all that autograd saves in a layer
    modules=("mlp",)      what it saves in the layer's module `mlp`, whose input is a part of that
    modules=("*norm*",)   in every module of the layer whose name fits

Where a layer runs again in the backward, it saves its inputs alone: these leave, and its modules change
nothing. What others hold as well stays: weights, buffers, and what a stage has received.
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
from penstock.runtime.around import around, is_around
from penstock.runtime.device.offload import Offload
from penstock.runtime.split_backward.modules import is_compiled
from penstock.schedule import Schedule
from penstock.schedule.offload import host_copies, offloaded


@dataclass(frozen=True)
class Offloading:
    """Which activations wait in host memory between forward and backward. Raises ConfigError.

    Args:
        modules: names of modules within a layer, with * and ? for any characters: "mlp", "self_attn",
            "*_layernorm". Empty: whole layers
        layers: number of layers of each stage, from its first one on, whose backward comes last; None: all
        ahead: ops of a rank in whose time a copy should be over, before the rank waits for it. The more, the
            longer lies in both memories what is copied
        min_bytes: of a tensor's memory; smaller ones stay on the device
    """

    modules: Sequence[str] = ()
    layers: int | None = None
    ahead: int = 1
    min_bytes: int = 2**20

    def __post_init__(self) -> None:
        if isinstance(self.modules, list):  # as a config has them; frozen, to be compared
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
    """Raise ConfigError where nothing would ever leave."""
    if not offloaded(host_copies(schedule, options.ahead)):
        raise ConfigError(
            f"activation_offloading with schedule {schedule.name!r}, {schedule.ranks} ranks and "
            f"{schedule.microbatches} microbatches",
            "between the forward and the backward of each microbatch its rank has fewer than "
            f"{2 * options.ahead + 1} other ops: all would be back before it is gone",
            "Leave it out, or take more ranks or microbatches, or a schedule that holds more of them",
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
    """Raise ConfigError for a name that is none of `names`, those of the modules of all layers."""
    for wanted in options.modules:
        if not any(fnmatchcase(name, wanted) for name in names):
            outer = sorted(name for name in names if "." not in name)
            rule = f"no layer has a module of that name; they have {', '.join(outer) or 'none'}"
            raise refusal("modules", wanted, rule, "Name modules of a layer, such as mlp or self_attn.q_proj")


def _offloaded(plain: Callable[..., Any]) -> Callable[..., Any]:
    """What autograd saves during the call of a module, hooks too, may leave the device."""

    def call(module: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() or not module._offload.records:
            return plain(module, *args, **kwargs)
        with module._offload.saving():
            return plain(module, *args, **kwargs)

    return call


def install(layers: Sequence[nn.Module], options: Offloading, offload: Offload) -> None:
    """Let the activations of a stage's layers leave, in place. layers: in the order in which they run"""
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
                "a compiler saves tensors in its own way, and no module within it is seen",
                "Compile each layer by itself, and offload whole layers",
            )
