"""Products of activations with a weight: which of torch's calls they are, and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.private import grouped_mm


class ProductForm(NamedTuple):
    """A product of activations x with a weight, and its gradients.

    add_weight_gradient: adds the weight's gradient in place, without a temporary tensor
    cast: whether autocast covers it
    """

    product: Callable[[Tensor, Tensor, Tensor | None], Tensor]  # x, weight, bias
    input_gradient: Callable[[Tensor, Tensor], Tensor]  # dy, weight
    weight_gradient: Callable[[Tensor, Tensor], Tensor]  # x, dy
    add_weight_gradient: Callable[[Tensor, Tensor, Tensor], object] | None = None  # gradient, x, dy
    cast: bool = True


def _transposed_product(left: Tensor, right: Tensor) -> Tensor:
    """leftᵀ right, of the rows of both."""
    if left.dim() == 1:
        left, right = left.unsqueeze(0), right.unsqueeze(0)
    return left.flatten(0, -2).t() @ right.flatten(0, -2)


def _add_of_linear(gradient: Tensor, x: Tensor, dy: Tensor) -> None:
    if x.dim() == 1:
        x, dy = x.unsqueeze(0), dy.unsqueeze(0)
    gradient.addmm_(dy.flatten(0, -2).t(), x.flatten(0, -2))


def _add_of_matmul(gradient: Tensor, x: Tensor, dy: Tensor) -> None:
    _add_of_linear(gradient, dy, x)


def _add_matmul(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.matmul(x, weight) if bias is None else torch.addmm(bias, x, weight)


def _grouped_weight_gradient(x: Tensor, dy: Tensor, offs: Tensor, transposed: bool) -> Tensor:
    """The weight gradient of a grouped product. transposed: weight and gradient are transposed views"""
    if transposed:
        return grouped_mm(dy.t(), x, offs).transpose(-2, -1)
    return grouped_mm(x.t(), dy, offs)


# y = x Wᵀ + b, any number of dimensions
LINEAR = ProductForm(
    F.linear,
    torch.matmul,
    lambda x, dy: _transposed_product(dy, x),
    _add_of_linear,
)
# y = x W + b
MATMUL = ProductForm(
    _add_matmul,
    lambda dy, weight: dy @ weight.t(),
    _transposed_product,
    _add_of_matmul,
)


def _grouped(offs: Tensor, transposed: bool) -> ProductForm:
    """y = x W[g] for the rows of group g, which ends at row offs[g]; autocast does not cover it"""
    return ProductForm(
        lambda x, weight, bias: grouped_mm(x, weight, offs),
        lambda dy, weight: grouped_mm(dy, weight.transpose(-2, -1), offs),
        partial(_grouped_weight_gradient, offs=offs, transposed=transposed),
        cast=False,
    )


# x, weight, bias and form of a call; None where it is left to torch
ProductCall = tuple[Tensor, Tensor, Tensor | None, ProductForm] | None


def _find_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> ProductCall:
    return (input, weight, bias, LINEAR) if weight.dim() == 2 else None


def _find_addmm(bias: Tensor, x: Tensor, weight: Tensor) -> ProductCall:
    return x, weight, bias, MATMUL


def _find_matmul(x: Tensor, weight: Tensor) -> ProductCall:
    return (x, weight, None, MATMUL) if weight.dim() == 2 and x.dim() > 0 else None


def _find_mm(x: Tensor, weight: Tensor) -> ProductCall:
    return (x, weight, None, MATMUL) if x.dim() == weight.dim() == 2 else None


def _find_grouped(
    x: Tensor, weight: Tensor, offs: Tensor | None = None, bias: None = None, out_dtype: None = None
) -> ProductCall:
    if offs is None or bias is not None or out_dtype is not None or (x.dim(), weight.dim()) != (2, 3):
        return None
    return x, weight, None, _grouped(offs, not weight.is_contiguous())


# by torch's function: the names of its arguments, and how to read them
CALLS: Mapping[object, tuple[tuple[str, ...], Callable[..., ProductCall]]] = {
    F.linear: (("input", "weight", "bias"), _find_linear),
    torch.addmm: (("input", "mat1", "mat2"), _find_addmm),
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__), (("input", "other"), _find_matmul)),
    **dict.fromkeys((torch.mm, Tensor.mm), (("input", "mat2"), _find_mm)),
    grouped_mm: (("input", "mat2", "offs", "bias", "out_dtype"), _find_grouped),
}


def find(
    names: tuple[str, ...], read: Callable[..., ProductCall], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> ProductCall:
    """The product that a call is, with arguments by position or name; names, read: from `CALLS`"""
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    if (
        len(args) > len(names)
        or not arguments.keys() <= set(names)
        or len(arguments) != len(args) + len(kwargs)
    ):
        return None
    tensors = [arguments.get(name) for name in names]
    return read(*tensors) if all(isinstance(tensor, Tensor) for tensor in tensors[:2]) else None
