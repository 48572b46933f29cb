"""A placeholder: what stands in a model where a layer was."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn


class Placeholder(nn.Module):
    """Stands where a layer of another stage stood: same place, same plain attributes, no parameters."""

    def __init__(self, layer: nn.Module, form: str) -> None:
        super().__init__()
        self._form = form
        self._kind = type(layer)
        for name, value in vars(layer).items():
            if not name.startswith("_") and name not in ("training", "gradient_checkpointing", "forward"):
                setattr(self, name, copy.copy(value))

    def __getattr__(self, name: str) -> Any:
        """What the layer's class makes of its plain attributes."""
        made = getattr(self.__dict__.get("_kind"), name, None)
        return made.fget(self) if isinstance(made, property) and made.fget else super().__getattr__(name)

    def give(self, hidden: Tensor, more: tuple[Any, ...] = (None,)) -> Any:
        """As a layer returns it; more: what it returns beside the hidden states, where that is a tuple."""
        if self._form == "tensor":
            return hidden
        return (hidden,) if self._form == "tuple" else (hidden, *more)
