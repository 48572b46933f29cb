"""The placeholder of a layer, and the arguments of a layer's call."""

from __future__ import annotations

import copy
from collections.abc import Iterator, MutableMapping
from typing import Any

from torch import Tensor, nn

from penstock.errors import ModelError
from penstock.private import keystr, tree_flatten_with_path, tree_unflatten


def hidden_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The hidden states among a layer's arguments."""
    hidden = args[0] if args else kwargs.get("hidden_states")
    if not isinstance(hidden, Tensor):
        raise ModelError(
            f"a layer called with {type(hidden).__name__} for its hidden states",
            "each layer takes the hidden states first",
            "This model cannot be cut between its layers",
        )
    return hidden


def with_hidden(args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Tensor) -> tuple[Any, Any]:
    """The arguments with other hidden states."""
    hidden_of(args, kwargs)  # raises where there are none
    return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})


def leaves(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every leaf of a call's arguments, with a name for where it is."""
    for path, value in tree_flatten_with_path((args, kwargs))[0]:
        yield keystr(path), value


def replaced(args: tuple[Any, ...], kwargs: dict[str, Any], values: dict[str, Tensor]) -> tuple[Any, Any]:
    """The arguments with the leaves of these names replaced by `values`."""
    named, tree = tree_flatten_with_path((args, kwargs))
    args, kwargs = tree_unflatten([values.get(keystr(path), leaf) for path, leaf in named], tree)
    return args, kwargs


def mappings(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[MutableMapping[str, Any]]:
    """The mappings among the arguments in which layers store values for each other."""
    return (value for value in (*args, *kwargs.values()) if is_shared(value))


def is_shared(value: object) -> bool:
    """Whether `value` is a mapping of the model's own class, shared by all layers; a leaf for pytrees."""
    return isinstance(value, MutableMapping) and not isinstance(value, dict)


class Placeholder(nn.Module):
    """Replaces a layer of another stage: the same plain attributes, but no parameters."""

    def __init__(self, layer: nn.Module, form: str) -> None:
        super().__init__()
        self._form = form
        self._kind = type(layer)
        for name, value in vars(layer).items():
            if not name.startswith("_") and name not in ("training", "gradient_checkpointing", "forward"):
                setattr(self, name, copy.copy(value))

    def __getattr__(self, name: str) -> Any:
        """Read a property of the layer's class."""
        attr = getattr(self.__dict__.get("_kind"), name, None)
        return attr.fget(self) if isinstance(attr, property) and attr.fget else super().__getattr__(name)

    def give(self, hidden: Tensor, more: tuple[Any, ...] = (None,)) -> Any:
        """A result in the form of the layer's result. more: the entries after the hidden states"""
        if self._form == "tensor":
            return hidden
        return (hidden,) if self._form == "tuple" else (hidden, *more)
