"""Values of a pipeline's weights and buffers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from support.mesh import full

Values = dict[str, Tensor]


def values(pipe: Any) -> Values:
    """Of this process's parameters and buffers, whole."""
    found: Values = {}
    for module in pipe.modules.values():
        named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers()]
        found |= {name: full(value.detach()).clone() for name, value in named}
    return found
