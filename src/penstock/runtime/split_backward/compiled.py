"""Layers compiled around their products, so that split backwards defer the weights' gradients.

A layer that is compiled whole is one node of autograd's graph: its backward computes all gradients at once,
and W has nothing to do. Here a compiled graph ends at each product. Norms, activations and residuals, which a
compiler fuses, lie between products in either case; the products are the same kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from penstock.errors import ConfigError
from penstock.runtime.around import around


def compile_around_products(layer: nn.Module, **options: Any) -> None:
    """Compile `layer` in place, but for its modules that hold a weight of a product, such as nn.Linear.

    Zero-bubble schedules gain from deferred gradients: a layer compiled whole defers none.

    Args:
        options: of torch.compile, such as backend and mode

    Raises ConfigError for fullgraph=True, for a layer with activation checkpointing, and for one with a
    bank of experts.
    """
    _check(layer, options)
    for module in layer.modules():
        if _has_products(module):
            around(module, forward=torch.compiler.disable)
    layer.compile(**options)


def _check(layer: nn.Module, options: Mapping[str, Any]) -> None:
    name = f"compile_around_products of a {type(layer).__name__}"
    if options.get("fullgraph"):
        raise ConfigError(f"fullgraph=True in {name}", "the graph ends at each product", "Leave it out")
    if getattr(layer, "is_checkpointed", False):
        rule = "torch compiles a checkpointed forward as one graph, and here graphs end at each product"
        remedy = "Compile the layer whole, by layer.compile(), or leave its checkpointing out"
        raise ConfigError(f"{name} with activation checkpointing", rule, remedy)
    if any(parameter.dim() > 2 for parameter in layer.parameters()):
        rule = "which experts work depends on values, which a compiler does not see"
        raise ConfigError(f"{name} with a bank of experts", rule, "Compile its other modules, one by one")


def _has_products(module: nn.Module) -> bool:
    weights = (parameter for parameter in module._parameters.values() if parameter is not None)
    alone = next(module.children(), None) is None and not isinstance(module, nn.Embedding)
    return alone and any(weight.dim() >= 2 for weight in weights)
