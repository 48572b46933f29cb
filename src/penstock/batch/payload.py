"""What crosses an edge: a tensor, or any nest of tuples, lists and dicts of them.

Tensors travel; the rest (the nesting, None, numbers, strings) is known at both ends beforehand or told ahead
of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import (
    TreeSpec,
    tree_flatten,
    tree_map,
    tree_unflatten,
    treespec_dumps,
    treespec_loads,
)

from penstock.errors import ShapeError

_CONSTANTS = (type(None), bool, int, float, str)


class TensorSpec(NamedTuple):
    """Shape and dtype of one tensor on an edge.

    differentiable: whether a gradient comes back for it, if it is of a dtype that can have one
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool = True

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    @property
    def carries_gradient(self) -> bool:
        return self.differentiable and (self.dtype.is_floating_point or self.dtype.is_complex)

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


class Form(NamedTuple):
    """A value without its tensors.

    tree: how its leaves nest, None where it is one tensor; constants: place and value of each other leaf
    """

    tree: TreeSpec | None = None
    constants: tuple[tuple[int, Any], ...] = ()


@dataclass(frozen=True)
class EdgeSpecs:
    """All that is known of a value before its tensors come."""

    tensors: tuple[TensorSpec, ...]
    form: Form = field(default_factory=Form)

    def __str__(self) -> str:
        told = ", ".join(map(str, self.tensors)) or "no tensor"
        if self.form.tree is None:
            return told
        constants = "".join(f", {value!r}" for _, value in self.form.constants)
        return f"{told}{constants} as {nesting(self.form)}"

    @classmethod
    def of(cls, tensors: Sequence[Tensor], form: Form) -> EdgeSpecs:
        return cls(tuple([TensorSpec.of(tensor) for tensor in tensors]), form)

    @cached_property
    def nbytes(self) -> int:
        return sum([spec.nbytes for spec in self.tensors])

    @cached_property
    def carrying(self) -> tuple[bool, ...]:
        """Of each tensor, whether a gradient comes back for it."""
        return tuple([spec.carries_gradient for spec in self.tensors])

    @cached_property
    def gradients(self) -> EdgeSpecs:
        """What comes back over the edge that this went out on: a tuple of tensors."""
        return EdgeSpecs(tuple([spec for spec in self.tensors if spec.carries_gradient]))


class Payload(NamedTuple):
    """A value that crosses an edge.

    loose: of its bytes, those that are held for nothing but to be sent; None: all
    """

    tensors: tuple[Tensor, ...]
    specs: EdgeSpecs
    loose: int | None = None

    @property
    def nbytes(self) -> int:
        return self.specs.nbytes

    @property
    def value(self) -> Any:
        return put_together(self.tensors, self.specs.form)


SINGLE = Form()


def take_apart(value: Any) -> tuple[tuple[Tensor, ...], Form]:
    """The tensors of `value`, and what is left of it.

    The entries of a mapping are put in the order of their names, so that their order means nothing.
    Raises ShapeError for what cannot cross an edge.
    """
    if isinstance(value, Tensor):
        return (value,), SINGLE
    leaves, tree = tree_flatten(_in_order(value))
    tensors = tuple([leaf for leaf in leaves if isinstance(leaf, Tensor)])
    constants = tuple([(i, leaf) for i, leaf in enumerate(leaves) if not isinstance(leaf, Tensor)])
    _check_constants(constants)
    return tensors, Form(tree, constants)


def _check_constants(constants: Sequence[tuple[int, Any]]) -> None:
    for _, constant in constants:
        if not isinstance(constant, _CONSTANTS):
            raise ShapeError(
                f"a {type(constant).__name__} in a stage's output",
                "tensors, numbers, strings, booleans and None cross an edge, in tuples, lists and dicts",
                "Return only what the next stage needs, in these",
            )


def _in_order(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, Mapping):
        return {name: _in_order(value[name]) for name in sorted(value, key=str)}
    if type(value) is list or type(value) is tuple:  # a named tuple stays one
        return type(value)([_in_order(entry) for entry in value])
    return value


def put_together(tensors: Sequence[Tensor], form: Form) -> Any:
    """The value that `take_apart` took apart."""
    if form.tree is None:
        return tensors[0]
    leaves: list[Any] = list(tensors)
    for place, constant in form.constants:  # in rising order, so that each one lands in its place
        leaves.insert(place, constant)
    return tree_unflatten(leaves, form.tree)


def declared(value: Any) -> EdgeSpecs:
    """Of a value in which TensorSpecs, or tensors without values, stand for the tensors to come.

    A tensor of a floating-point dtype counts as one that has a gradient; a TensorSpec can say otherwise.
    Raises ShapeError for what cannot cross an edge.
    """
    standing = tree_map(_Standing, _in_order(value), is_leaf=lambda v: isinstance(v, TensorSpec))
    leaves, tree = tree_flatten(standing)
    given = [leaf.value for leaf in leaves]
    specs = [TensorSpec(tuple(v.shape), v.dtype) if isinstance(v, Tensor) else v for v in given]
    tensors = tuple(spec for spec in specs if isinstance(spec, TensorSpec))
    if isinstance(value, Tensor | TensorSpec):
        return EdgeSpecs(tensors)
    constants = tuple((i, spec) for i, spec in enumerate(specs) if not isinstance(spec, TensorSpec))
    _check_constants(constants)
    return EdgeSpecs(tensors, Form(tree, constants))


def describe(tensors: Sequence[Tensor]) -> str:
    return ", ".join(str(TensorSpec.of(tensor)) for tensor in tensors) or "no tensor"


def nesting(form: Form) -> str:
    """The form in words: {'hidden': tensor, 'length': 7}."""
    if form.tree is None:
        return "tensor"
    constants = dict(form.constants)
    leaves = [_Named(repr(constants[i]) if i in constants else "tensor") for i in range(form.tree.num_leaves)]
    return repr(tree_unflatten(leaves, form.tree))


class _Standing:
    """Keeps a TensorSpec, which is a tuple, whole."""

    def __init__(self, value: Any) -> None:
        self.value = value


class _Named:
    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


def pack_specs(specs: EdgeSpecs) -> bytes:
    """As text, for who does not know them; `unpack_specs` is the way back.

    Raises ShapeError for a type that has no name to be told by, e.g. a named tuple.
    """
    tensors = [[list(s.shape), str(s.dtype).removeprefix("torch."), s.differentiable] for s in specs.tensors]
    try:
        tree = None if specs.form.tree is None else treespec_dumps(specs.form.tree)
    except NotImplementedError as cause:
        raise ShapeError(
            f"a stage's output {nesting(specs.form)}",
            "ahead of the tensors only tuples, lists and dicts can be told of",
            "Return one of these, or leave shapes at 'inferred'",
        ) from cause
    return json.dumps([tensors, tree, [list(pair) for pair in specs.form.constants]]).encode()


def unpack_specs(text: bytes) -> EdgeSpecs:
    tensors, tree, constants = json.loads(text)
    return EdgeSpecs(
        tuple(TensorSpec(tuple(shape), getattr(torch, dtype), diff) for shape, dtype, diff in tensors),
        Form(None if tree is None else treespec_loads(tree), tuple((i, value) for i, value in constants)),
    )
