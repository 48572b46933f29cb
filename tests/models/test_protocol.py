"""How a module of one's own is run as a stage, and which layers it gets."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from penstock.errors import ModelError, PartitionError
from penstock.models.stage import (
    DeclaredEdges,
    ProvidedCall,
    StageInfo,
    distribute_layers,
    own_layers,
    provided_edges,
)
from penstock.runtime.transport.groups import OneProcess

BATCH = {"x": "the batch's x", "y": "the batch's y", "z": "the batch's z"}


class BatchLike(nn.Module):
    """Tells what it was given."""


def call(forward: Any, *received: Any) -> Any:
    """What `forward`, a module's, gets of `received` and BATCH."""
    module = type("Given", (BatchLike,), {"forward": staticmethod(forward)})()
    return ProvidedCall(module)(received, BATCH)


class Pair(NamedTuple):
    one: Any
    other: Any


def test_the_first_stage_gets_entries_of_the_batch() -> None:
    assert call(lambda x, z: (x, z)) == (BATCH["x"], BATCH["z"])
    assert call(lambda x, unknown=3, *, y: (x, unknown, y)) == (BATCH["x"], 3, BATCH["y"])


def test_a_single_value_is_the_first_argument() -> None:
    assert call(lambda x, y: (x, y), 1) == (1, BATCH["y"])
    assert call(lambda hidden, *, x: (hidden, x), 1) == (1, BATCH["x"])
    assert call(lambda x=0: x, None) is None
    assert call(lambda pair: pair, Pair(1, 2)) == Pair(1, 2)


@pytest.mark.parametrize("several", [(1, 2), [1, 2]])
def test_tuples_and_lists_are_given_by_position(several: Any) -> None:
    assert call(lambda a, b, z: (a, b, z), several) == (1, 2, BATCH["z"])
    assert call(lambda x, y, z: (x, y, z), several) == (1, 2, BATCH["z"])


def test_beside_what_is_given_by_position() -> None:
    """Unreleased: parameters without names counted, so that entries of the batch were left out."""
    assert call(lambda *parts, x: (parts, x), (1, 2)) == ((1, 2), BATCH["x"])
    assert call(lambda a, *parts, x, y: (a, parts, x, y), (1, 2)) == (1, (2,), BATCH["x"], BATCH["y"])
    assert call(lambda a, /, x: (a, x), 1) == (1, BATCH["x"])
    assert call(lambda x, /, y, *, z: (x, y, z), (1,)) == (1, BATCH["y"], BATCH["z"])
    assert call(lambda a=0, *parts, x=0: (a, parts, x), ()) == (0, (), BATCH["x"])


def test_mappings_are_given_by_name() -> None:
    assert call(lambda x, hidden, y: (x, hidden, y), {"hidden": 1}) == (BATCH["x"], 1, BATCH["y"])
    assert call(lambda x, y: (x, y), {"x": 1}) == (1, BATCH["y"])  # before the batch's of that name
    assert call(lambda x, **more: (x, more), {"a": 1, "b": 2}) == (BATCH["x"], {"a": 1, "b": 2})


@pytest.mark.parametrize(
    ("forward", "received", "message"),
    [
        (lambda hiden: 0, {"hidden": 1, "mask": 2},
         r"Given.forward\(hiden\): it cannot take .*\(hidden, mask\).*missing a required argument: 'hiden'"),
        (lambda hiden=0: 0, {"hidden": 1}, "got an unexpected keyword argument 'hidden'"),
        (lambda hidden: 0, {0: 1}, "keywords must be strings"),
        (lambda a, *, x: 0, (1, 2), r"forward\(a, x\): .*2 values by position.*too many positional"),
        (lambda *, x: 0, 1, r"1 values by position.*too many positional arguments"),
        (lambda hidden, deep: 0, 1, r"the batch \(x, y, z\): missing a required argument: 'deep'"),
        (lambda hidden, x, deep: 0, {"hidden": 1}, "'deep'. Give it a parameter for each value"),
    ],
)  # fmt: skip
def test_arguments_that_forward_does_not_take(forward: Any, received: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        call(forward, received)


def test_a_parameter_that_the_batch_does_not_fill_on_the_first_stage() -> None:
    with pytest.raises(ModelError, match=r"the batch \(x, y, z\): missing a required argument: 'b'"):
        call(lambda b, x: 0)


@pytest.mark.parametrize("stages", range(1, 7))
@pytest.mark.parametrize(("before", "after"), [(1, 1), (0, 0), (2, 1), (0, 3)])
def test_layers_are_dealt_out_evenly(stages: int, before: int, after: int) -> None:
    found = [
        list(distribute_layers(12, StageInfo(s, stages), before=before, after=after)) for s in range(stages)
    ]
    assert [layer for layers in found for layer in layers] == list(range(12))
    loads = [len(layers) for layers in found]
    loads[0] += before
    loads[-1] += after
    assert max(loads) - min(loads) <= 1 or min(map(len, found)) == 1


def test_more_stages_than_layers() -> None:
    with pytest.raises(PartitionError, match="4 stages for 3 layers"):
        distribute_layers(3, StageInfo(1, 4))


def test_where_a_stage_stands() -> None:
    ends = [(info.is_first, info.is_last) for info in (StageInfo(s, 3) for s in range(3))]
    assert ends == [(True, False), (False, False), (False, True)]
    assert StageInfo(0, 1).is_first
    assert StageInfo(0, 1).is_last


def test_layers_are_those_of_the_outermost_lists() -> None:
    inner = nn.Sequential(nn.ModuleList([nn.Linear(1, 1)]))
    module = nn.ModuleDict({"4": inner, "5": nn.Linear(2, 2), "last": nn.Linear(3, 3)})
    holder = nn.Module()
    holder.layers = module
    assert list(own_layers(holder)) == [(4, module["4"]), (5, module["5"]), (2, module["last"])]
    alone = nn.Linear(1, 1)
    assert list(own_layers(alone)) == [(0, alone)]


def test_what_declares_shapes() -> None:
    """Each stage no more than is asked of it, but all of them."""

    class Gives(nn.Module):
        def infer_outputs(self, microbatch: Any) -> Any:
            return torch.empty(1)

    class Takes(nn.Module):
        def infer_inputs(self, microbatch: Any) -> Any:
            return torch.empty(1)

    def declared(first: nn.Module, last: nn.Module) -> bool:
        made = provided_edges(lambda info: first, {0: first, 1: last}, 2, OneProcess())
        return isinstance(made, DeclaredEdges)

    assert declared(Gives(), Takes())
    assert not declared(Takes(), Gives())
    assert not declared(Gives(), nn.Linear(1, 1))
