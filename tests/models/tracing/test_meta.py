"""Copies of modules without values: a fast one that gives what `copy.deepcopy` gives."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from penstock.models.tracing.meta import deep_copy, is_empty, without_values


class Odd(nn.Module):
    """Holds what a copy could share by mistake, or lose."""

    registry: dict[str, int]

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.again = self.first
        self.nothing = None
        self.register_module("absent", None)
        self.empty = nn.ModuleList()
        self.register_buffer("table", torch.ones(3), persistent=False)
        self.registry = {}  # which both fill later
        vars(self.first)["registry"] = self.registry
        self.outside: list[Any] = [self.first, {"kept": [1]}]
        self.first.register_forward_hook(print)
        self.recurrent = nn.GRU(2, 2)  # has a __setstate__ of its own


class CopiesItself(nn.Module):
    def __deepcopy__(self, memo: dict[int, Any]) -> CopiesItself:
        return self


@pytest.mark.parametrize("how", [deep_copy, copy.deepcopy])
def test_a_copy_shares_nothing_that_can_change(how: Callable[[Any, dict[int, Any]], Any]) -> None:
    module = Odd()
    copied = how(module, {})
    assert vars(copied).keys() == vars(module).keys()
    assert copied.first is copied.again is copied.outside[0]
    assert copied.first is not module.first
    assert copied.first.weight is not module.first.weight
    assert torch.equal(copied.first.weight, module.first.weight)
    assert copied.registry is copied.first.registry is not module.registry
    assert copied.empty is not module.empty
    assert copied.absent is None
    assert copied.table is not module.table
    assert copied._non_persistent_buffers_set == {"table"}
    assert copied._non_persistent_buffers_set is not module._non_persistent_buffers_set
    assert copied.outside[1]["kept"] is not module.outside[1]["kept"]
    assert list(copied.first._forward_hooks.values()) == [print]
    module.first._forward_hooks.clear()
    assert copied.first._forward_hooks
    copied.train(False)
    assert module.first.training
    assert copied.recurrent(torch.zeros(1, 1, 2))[0].shape == (1, 1, 2)


def test_a_module_that_copies_itself_is_asked() -> None:
    module = nn.Sequential(CopiesItself())
    assert deep_copy(module, {})[0] is module[0]


def test_what_the_memo_names_is_put_in_place() -> None:
    module = Odd()
    other = nn.Linear(2, 2)
    assert deep_copy(module, {id(module.first): other}).again is other


def test_a_copy_without_values_keeps_no_memory_of_the_original() -> None:
    """0.5.0: a model that keeps an output of an earlier forward ended in torch's RuntimeError, of copies."""
    module = Odd()
    module.output = module.first.weight * 2
    copied = without_values(module)
    assert is_empty(copied)
    assert copied.output.is_meta
    assert copied.first is copied.again
    assert not is_empty(module)
