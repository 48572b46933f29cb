"""The placeholder of a layer, and the arguments of a layer's call."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch
from torch import nn

from penstock.errors import ModelError
from penstock.models.tracing.placeholder import (
    Placeholder,
    hidden_of,
    leaves,
    mappings,
    replaced,
    with_hidden,
)
from support.refusals import refuses

HIDDEN, OTHER = torch.zeros(2), torch.ones(2)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.layer_idx, self.names = 4, ["a"]

    @property
    def doubled(self) -> int:
        return 2 * self.layer_idx


@pytest.mark.parametrize(
    ("args", "kwargs"), [((HIDDEN, 1), {"b": 2}), ((), {"hidden_states": HIDDEN, "b": 2})]
)
def test_hidden_states_come_first_or_by_name(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    assert hidden_of(args, kwargs) is HIDDEN
    args, kwargs = with_hidden(args, kwargs, OTHER)
    assert hidden_of(args, kwargs) is OTHER
    assert kwargs["b"] == 2


def test_a_layer_that_takes_no_hidden_states_first_is_refused() -> None:
    with refuses(ModelError, "a layer called with int for its hidden states"):
        with_hidden((7,), {}, OTHER)


def test_values_are_replaced_by_the_names_of_their_places() -> None:
    args, kwargs = (HIDDEN, [1, HIDDEN]), {"mask": HIDDEN}
    names = [name for name, value in leaves(args, kwargs) if value is HIDDEN]
    assert len(names) == 3
    args, kwargs = replaced(args, kwargs, {names[1]: OTHER})
    assert [value is OTHER for _, value in leaves(args, kwargs)] == [False, False, True, False]


def test_mappings_of_a_class_of_the_models_own_are_shared() -> None:
    shared: UserDict[str, Any] = UserDict()
    assert list(mappings(({}, shared, HIDDEN), {"more": {"x": 1}})) == [shared]


def test_a_placeholder_has_the_plain_attributes_and_properties_and_no_weights() -> None:
    layer = Layer()
    placeholder = Placeholder(layer, "tensor")
    assert (placeholder.layer_idx, placeholder.doubled) == (4, 8)
    assert list(placeholder.parameters()) == []
    layer.names.append("b")
    assert placeholder.names == ["a"]  # a copy
    with pytest.raises(AttributeError, match="weight"):
        _ = placeholder.weight


def test_a_placeholder_returns_what_its_layer_would() -> None:
    assert Placeholder(Layer(), "tensor").give(HIDDEN) is HIDDEN
    assert Placeholder(Layer(), "tuple").give(HIDDEN) == (HIDDEN,)
    assert Placeholder(Layer(), "more").give(HIDDEN, (None, 1)) == (HIDDEN, None, 1)
