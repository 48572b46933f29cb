"""torch.compile of each layer of a stage, and of the next-token loss: the option `compile`.

A layer that is compiled whole is one node of autograd's graph, and a split backward can defer no part of it.
A layer compiled around its products (penstock.compile_around_products) has several nodes, whose weight
gradients are deferred to W.

    layers      1f1b, gpipe, ...     zb_h1, zb_v, dualpipe_v, ...
    auto        whole                around products; whole where the layer is recomputed or has experts
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import nn

from penstock.batch.loss import Loss, TokenLabels
from penstock.errors import ConfigError
from penstock.options import CompiledLayers, CompileOptions
from penstock.runtime.split_backward.compiled import compile_around_products


@dataclass(frozen=True)
class Compile(CompileOptions):
    """What torch.compile compiles: `CompileOptions`. Raises ConfigError."""

    def __post_init__(self) -> None:
        if self.layers not in get_args(CompiledLayers):
            known = ", ".join(map(repr, get_args(CompiledLayers)))
            raise ConfigError(f"compile.layers={self.layers!r}", f"it is one of {known}", "Take 'auto'")
        if self.layers == "none" and not self.loss:
            rule = "neither layers nor the loss are compiled"
            raise ConfigError("compile with layers='none' and loss=False", rule, "Leave compile out")

    @property
    def options(self) -> dict[str, Any]:
        """The keywords of torch.compile."""
        return {"backend": self.backend, "mode": self.mode, "dynamic": self.dynamic}


CompileLike = bool | Compile


def as_compile(option: object) -> Compile | None:
    """The option `compile` in any of its forms. Raises ConfigError."""
    if isinstance(option, Compile):
        return option
    if option is True or option is False:
        return Compile() if option else None
    rule = "it is True, False or a penstock.pipeline.Compile"
    raise ConfigError(f"compile={option!r}", rule, "Take True")


def check_compiler(option: Compile, device: torch.device) -> None:
    """Raise ConfigError for a backend or a mode that torch lacks, or that cannot run on this machine."""
    if option.backend not in (known := torch.compiler.list_backends(exclude_tags=())):
        shown = ", ".join(known)
        raise ConfigError(f"compile.backend={option.backend!r}", f"torch knows {shown}", "Take 'inductor'")
    if option.backend != "inductor":
        return
    from penstock.private import list_mode_options

    if option.mode not in (None, *(known := list_mode_options())):
        shown = ", ".join(known)
        raise ConfigError(f"compile.mode={option.mode!r}", f"torch knows {shown}", "Take 'default'")
    if device.type == "cuda":
        from penstock.private import has_triton

        if not has_triton():
            rule = "for a GPU it needs Triton, which is not installed or does not support this GPU"
            raise ConfigError("compile.backend='inductor'", rule, "Install triton, or leave compile out")
        return
    from penstock.private import InvalidCxxCompiler, get_cpp_compiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as cause:
        rule = "for a CPU it needs a C++ compiler, and finds none"
        remedy = "Install g++, name one in the environment variable CXX, or leave compile out"
        raise ConfigError("compile.backend='inductor'", rule, remedy) from cause


def compile_layers(layers: Iterable[nn.Module], option: Compile, *, splits: bool) -> None:
    """Compile layers in place, each when it first runs.

    splits: whether backwards are split
    Raises ConfigError for layers="products" where a layer cannot be compiled around its products.
    """
    for layer in layers:
        if option.layers == "products" or (option.layers == "auto" and splits and _goes_in_pieces(layer)):
            compile_around_products(layer, **option.options)
        elif option.layers != "none":
            layer.compile(**option.options)


def _goes_in_pieces(layer: nn.Module) -> bool:
    """Whether `compile_around_products` supports the layer."""
    experts = any(parameter.dim() > 2 for parameter in layer.parameters())
    return not experts and not getattr(layer, "is_checkpointed", False)


def compiled_loss(loss: Loss, option: Compile | None) -> Loss:
    """`loss` with its arithmetic compiled, if it is a loss over tokens."""
    if option is None or not option.loss or not isinstance(loss, TokenLabels):
        return loss
    return loss.compiled(**option.options)
