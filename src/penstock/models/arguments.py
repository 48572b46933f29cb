"""The arguments of a layer's call."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_unflatten

from penstock.errors import ModelError


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
    return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})


def places(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every leaf of a call's arguments, with a name for its place."""
    for path, value in tree_flatten_with_path((args, kwargs))[0]:
        yield keystr(path), value


def replaced(args: tuple[Any, ...], kwargs: dict[str, Any], values: dict[str, Tensor]) -> tuple[Any, Any]:
    """The arguments with other values in some places."""
    leaves, tree = tree_flatten_with_path((args, kwargs))
    args, kwargs = tree_unflatten([values.get(keystr(path), leaf) for path, leaf in leaves], tree)
    return args, kwargs


def mappings(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[MutableMapping[str, Any]]:
    """Those among the arguments that torch does not take apart: layers hand each other values in them."""
    return (value for value in (*args, *kwargs.values()) if is_shared(value))


def is_shared(value: object) -> bool:
    return isinstance(value, MutableMapping) and not isinstance(value, dict)
