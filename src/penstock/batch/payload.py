"""What crosses an edge: a tensor, or any nest of tuples, lists and dicts of tensors and constants.

    value --flatten--> tensors + Form --unflatten--> value
                          |
                       EdgeSpecs: shapes, dtypes, nesting, constants

Tensors travel. Everything else (nesting, None, numbers, strings) is known to both ends beforehand, or sent
ahead.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.errors import ShapeError
from penstock.private import TreeSpec, tree_flatten, tree_unflatten, treespec_dumps, treespec_loads

_CONSTANTS = (type(None), bool, int, float, str)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of one tensor on an edge.

    Args:
        shape: the tensor's size in each dimension
        dtype: as the tensor leaves its stage
        differentiable: whether a gradient comes back for it, if its dtype can have one
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool = True

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """The spec of `tensor`."""
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

    tree: how its leaves nest, None where it is one tensor; constants: position and value of each other leaf
    """

    tree: TreeSpec | None = None
    constants: tuple[tuple[int, Any], ...] = ()

    def __str__(self) -> str:
        """The nesting in words: {'hidden': tensor, 'length': 7}."""
        if self.tree is None:
            return "tensor"
        constants = dict(self.constants)
        words = [repr(constants[i]) if i in constants else "tensor" for i in range(self.tree.num_leaves)]
        return repr(tree_unflatten(map(_Word, words), self.tree))


class _Word(str):
    """A string that is its own repr."""

    __repr__ = str.__str__


SINGLE = Form()


@dataclass(frozen=True)
class EdgeSpecs:
    """Everything about a value but the contents of its tensors."""

    tensors: tuple[TensorSpec, ...]
    form: Form = field(default_factory=Form)

    def __str__(self) -> str:
        tensors = ", ".join(map(str, self.tensors)) or "no tensor"
        if self.form.tree is None:
            return tensors
        constants = "".join(f", {value!r}" for _, value in self.form.constants)
        return f"{tensors}{constants} as {self.form}"

    @classmethod
    def of(cls, tensors: Sequence[Tensor], form: Form) -> EdgeSpecs:
        return cls(tuple([TensorSpec.of(tensor) for tensor in tensors]), form)

    @cached_property
    def nbytes(self) -> int:
        return sum([spec.nbytes for spec in self.tensors])

    @cached_property
    def carrying(self) -> tuple[bool, ...]:
        """For each tensor, whether a gradient comes back for it."""
        return tuple([spec.carries_gradient for spec in self.tensors])

    @cached_property
    def gradients(self) -> EdgeSpecs:
        """The specs of the gradients that come back over this edge, as a tuple of tensors."""
        return EdgeSpecs(tuple([spec for spec in self.tensors if spec.carries_gradient]))


class Payload(NamedTuple):
    """A value that crosses an edge.

    only_sent: bytes that are in memory only to be sent; None: all of its bytes
    """

    tensors: tuple[Tensor, ...]
    specs: EdgeSpecs
    only_sent: int | None = None

    @property
    def nbytes(self) -> int:
        return self.specs.nbytes

    @property
    def value(self) -> Any:
        return unflatten(self.tensors, self.specs.form)


def flatten(value: Any, kinds: type | tuple[type, ...] = Tensor) -> tuple[tuple[Any, ...], Form]:
    """The tensors of `value`, and its form. Raises ShapeError for what cannot cross an edge.

    The entries of a mapping are sorted by name, so that their order has no meaning.

    kinds: what counts as a tensor
    """
    if isinstance(value, kinds):
        return (value,), SINGLE
    leaves, tree = tree_flatten(_sorted(value))
    tensors = tuple([leaf for leaf in leaves if isinstance(leaf, kinds)])
    constants = tuple([(i, leaf) for i, leaf in enumerate(leaves) if not isinstance(leaf, kinds)])
    for _, constant in constants:
        if not isinstance(constant, _CONSTANTS):
            raise ShapeError(
                f"a {type(constant).__name__} in a stage's output",
                "tensors, numbers, strings, booleans and None cross an edge, in tuples, lists and dicts",
                "Return only what the next stage needs, in these",
            )
    return tensors, Form(tree, constants)


def unflatten(tensors: Sequence[Tensor], form: Form) -> Any:
    """The value that `flatten` took apart."""
    if form.tree is None:
        return tensors[0]
    leaves: list[Any] = list(tensors)
    for position, constant in form.constants:  # in rising order, so that each lands in its position
        leaves.insert(position, constant)
    return tree_unflatten(leaves, form.tree)


def declared(value: Any) -> EdgeSpecs:
    """The specs of a value in which TensorSpecs, or meta tensors, take the place of tensors.

    A tensor of a floating-point dtype counts as differentiable; a TensorSpec can say otherwise. Raises
    ShapeError for what cannot cross an edge.
    """
    tensors, form = flatten(value, (Tensor, TensorSpec))
    return EdgeSpecs(
        tuple([v if isinstance(v, TensorSpec) else TensorSpec(tuple(v.shape), v.dtype) for v in tensors]),
        form,
    )


def _sorted(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _sorted(value[name]) for name in sorted(value, key=str)}
    if type(value) is list or type(value) is tuple:  # a named tuple stays one
        return type(value)([_sorted(entry) for entry in value])
    return value


def pack_specs(specs: EdgeSpecs) -> bytes:
    """The specs as text, for a receiver that does not know them; `unpack_specs` reads it.

    Raises ShapeError for a type that text cannot name, e.g. a named tuple.
    """
    tensors = [[list(s.shape), str(s.dtype).removeprefix("torch."), s.differentiable] for s in specs.tensors]
    try:
        tree = None if specs.form.tree is None else treespec_dumps(specs.form.tree)
    except NotImplementedError as cause:
        rule = "only the nesting of tuples, lists and dicts can be sent ahead of the tensors"
        remedy = "Return one of these, or leave shapes at 'inferred'"
        raise ShapeError(f"a stage's output {specs.form}", rule, remedy) from cause
    return json.dumps([tensors, tree, [list(pair) for pair in specs.form.constants]]).encode()


def unpack_specs(text: bytes) -> EdgeSpecs:
    tensors, tree, constants = json.loads(text)
    return EdgeSpecs(
        tuple(TensorSpec(tuple(shape), getattr(torch, dtype), diff) for shape, dtype, diff in tensors),
        Form(None if tree is None else treespec_loads(tree), tuple((i, value) for i, value in constants)),
    )
