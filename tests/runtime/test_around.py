"""A function around a module's call or its forward changes nothing else of the module."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import AutoPipeline
from penstock.models.activation_offloading import Offloading
from penstock.runtime.around import around, derive, is_around, undo
from support.families import tiny_model


class Layer(nn.Module):
    """Adds 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.calls: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        """One more."""
        self.calls.append("forward")
        return x + self.weight


def named(name: str) -> Callable[[Any], Any]:
    """A maker: what it makes writes this name down, and then does what was there."""

    def maker(plain: Any) -> Any:
        def run(module: Any, *args: Any, **kwargs: Any) -> Any:
            module.calls.append(name)
            return plain(module, *args, **kwargs)

        return run

    return maker


def test_a_call_is_around_the_hooks_and_a_forward_inside_of_them() -> None:
    layer = Layer()
    around(layer, forward=named("inner forward"))
    around(layer, forward=named("outer forward"))
    around(layer, __call__=named("inner call"))
    around(layer, __call__=named("outer call"))
    layer.register_forward_pre_hook(lambda module, args: layer.calls.append("hook"))
    assert layer(torch.zeros(2)).tolist() == [1, 1]
    assert layer.calls == ["outer call", "inner call", "hook", "outer forward", "inner forward", "forward"]


def test_all_else_stays_as_it_was() -> None:
    layer, other = Layer(), Layer()
    around(layer, forward=named("forward of one"))
    kind = type(layer)
    assert isinstance(layer, Layer)
    assert (kind.__name__, kind.__module__) == (Layer.__name__, Layer.__module__)
    assert kind.forward.__doc__ == "One more."
    assert [*layer.state_dict()] == ["weight"]
    assert type(other) is Layer
    copied = copy.deepcopy(layer)
    copied.calls.clear()
    copied(torch.zeros(2))
    assert copied.calls == ["forward of one", "forward"]
    assert not layer.calls


def test_one_class_for_all_modules_of_a_kind_and_once_for_each() -> None:
    """torch.compile compiles a forward anew for each class of its modules, and gives up after 8."""
    maker, layers = named("once"), (Layer(), Layer())
    for layer in (*layers, layers[0]):
        around(layer, __call__=maker)
    assert type(layers[0]) is type(layers[1])
    layers[0](torch.zeros(2))
    assert layers[0].calls == ["once", "forward"]
    assert derive(Layer, __call__=maker) is not derive(Layer, __call__=maker)


def test_undone_it_is_the_class_of_before() -> None:
    layer, inner, outer = Layer(), named("inner"), named("outer")
    around(layer, __call__=inner)
    around(layer, __call__=outer)
    with pytest.raises(AssertionError):
        undo(layer, inner)
    undo(layer, outer)
    assert is_around(inner, layer)
    assert not is_around(outer, layer)
    undo(layer, inner)
    assert type(layer) is Layer


def test_who_is_around_whom_in_a_stage() -> None:
    """As the table in the module says."""
    model = tiny_model("llama", layers=2, attention_dropout=0.1)
    options = Offloading(min_bytes=0)
    pipe = AutoPipeline(
        ranks=2,
        schedule="gpipe",
        microbatches=4,
        activation_checkpointing=True,
        activation_offloading=options,
    ).build(model)
    layer: Any = pipe.modules[0].get_submodule("model.layers.0")
    makers = [maker.__name__ for kind in type(layer).__mro__ for maker in vars(kind).get("_makers", ())]
    assert makers == ["_seeded", "_offloaded", "_checkpointed", "at_boundary"]
