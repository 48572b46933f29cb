"""Deferred weight gradients: the half of a zero-bubble backward that needs no graph.

W needs x and dy of each product that I deferred (recording.py), and neither the graph nor the weight's
values. So I frees everything else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from penstock.private import FakeTensor, is_any_autocast_enabled
from penstock.private import storage_use_count as _use_count
from penstock.runtime.split_backward.products import ProductForm

# (node, which of its inputs), as in `Node.next_functions`, or with what holds the node
Edge = tuple[Node, int] | GradientEdge

LEAF = "torch::autograd::AccumulateGrad"
CAST = "ToCopyBackward0"
_WIDE = (torch.float32, torch.float64)  # in these, one rounding fewer is within the rounding of a sum
# Subclasses (DTensor, quantised weights) have products of their own. A FakeTensor takes the place of a plain
# tensor where an estimate runs a stage without values: it defers as a step does.
PLAIN = (Tensor, nn.Parameter, FakeTensor)


class Product(NamedTuple):
    """A deferred weight gradient, with the versions that x and dy had in I.

    edge: where the gradient enters the views that made the weight; None where it is the parameter itself
    counts: whether x takes memory; a parameter is in memory anyway
    """

    parameter: Tensor
    edge: Edge | None
    x: Tensor
    dy: Tensor
    versions: tuple[int, int]
    counts: bool
    form: ProductForm

    def gradient(self) -> Tensor:
        self.check()
        return self.form.weight_gradient(self.x, self.dy)

    def check(self) -> None:
        if (self.x._version, self.dy._version) != self.versions:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace "
                f"operation between I and W: the activation {list(self.x.shape)} that entered a product with "
                f"a weight, or the gradient {list(self.dy.shape)} of what came out. Modify a copy of it, or "
                "take a schedule without W"
            )


class Deferral(NamedTuple):
    """How much the I of a microbatch deferred.

    flops: of the weight gradients, by the id of their parameter; rows: of the longest product's x
    """

    flops: Mapping[int, int]
    rows: int

    def after(self, first: Deferral | None) -> Deferral:
        """`first`, and the weights that only this later microbatch uses, as for images or other experts."""
        return self if first is None else Deferral({**self.flops, **first.flops}, first.rows or self.rows)

    @property
    def total(self) -> int:
        return sum(self.flops.values())


class Deferred:
    """The weight gradients that an I defers to its W."""

    def __init__(self, products: Sequence[Product] = ()) -> None:
        groups: dict[int, list[Product]] = {}
        for product in _owned(products):
            groups.setdefault(id(product.parameter), []).append(product)
        self._groups = list(groups.values())[::-1]  # taken from the end: in I's order

    @property
    def nbytes(self) -> int:
        """Bytes kept only for W, with each storage counted once, and without parameters."""
        storages = {
            storage._cdata: storage.nbytes()
            for group in self._groups
            for product in group
            for tensor in ((product.x, product.dy) if product.counts else (product.dy,))
            for storage in (tensor.untyped_storage(),)
        }
        return sum(storages.values())

    @property
    def deferral(self) -> Deferral:
        flops: Counter[int] = Counter()
        rows = [0]
        for product in (product for group in self._groups for product in group):
            flops[id(product.parameter)] += 2 * product.x.numel() * product.dy.shape[-1]
            rows.append(product.x.numel() // product.x.shape[-1])
        return Deferral(flops, max(rows))

    def run(self) -> None:
        """Accumulate the deferred weight gradients, and free x and dy.

        All products of a parameter are summed first, so that it accumulates once, as in a whole backward;
        parameters follow one another, so that one new gradient at a time is in memory. Raises RuntimeError
        where an x or dy has been modified in place since I.
        """
        with without_autocast():
            while self._groups:
                _accumulate(self._groups.pop())


def _accumulate(products: list[Product]) -> None:
    """Accumulate one parameter's gradient. Empties `products`, so that x and dy are freed after their use."""
    parameter = products[0].parameter
    if not parameter.requires_grad:  # frozen since: autograd drops its gradient as well
        products.clear()
        return
    gradient = parameter.grad
    enters = LEAF if len(products) == 1 and products[0].edge is None else _enters(products)
    if enters is None or parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        _accumulate_in_engine(parameter, products)
    elif gradient is None:
        products.reverse()
        total = _sum(products)
        if enters == CAST:
            total = total.to(parameter.dtype)
        if _is_like(total, parameter):
            parameter.grad = total
        else:  # autograd gives it the layout of the parameter
            run_engine((get_gradient_edge(parameter),), (total,))
    elif not (  # what autograd itself would add to in place
        type(gradient) in PLAIN
        and gradient.layout is torch.strided
        and gradient.dtype is parameter.dtype
        and gradient.is_floating_point()
        and not gradient.requires_grad
    ):
        _accumulate_in_engine(parameter, products)
    elif enters == LEAF and gradient.dtype in _WIDE:
        products.reverse()
        while products:
            product = products.pop()
            _, _, x, dy, versions, _, form = product
            if (x._version, dy._version) != versions:
                product.check()
            if form.add_weight_gradient is None:
                gradient += form.weight_gradient(x, dy)
            else:
                form.add_weight_gradient(gradient, x, dy)
            del product, x, dy  # freed before the next one's gradient is made
    else:
        products.reverse()
        gradient += _sum(products)


def _enters(products: Sequence[Product]) -> str | None:
    """The node that the gradients of all products enter, if W need not run it.

    LEAF: the weight is the parameter itself. CAST: the weight is one half-precision copy of the parameter, as
    under autocast: the sum of gradients may be added as it is. Autograd converts it to the parameter's dtype
    first, which changes no value and is one more pass over memory.
    """
    first = products[0]
    if first.edge is None:
        return LEAF if all(product.edge is None for product in products) else None
    node = first.edge[0]
    name = node.name()
    if any(product.edge is None or product.edge[0] is not node for product in products):
        return None
    is_cast = (
        name == CAST
        and node.next_functions[0][0].name() == LEAF  # type: ignore[union-attr]
        and first.dy.dtype in (torch.bfloat16, torch.float16)
        and first.dy.device == first.parameter.device
    )
    return name if is_cast else None


def _is_like(gradient: Tensor, parameter: Tensor) -> bool:
    """Whether autograd would keep `gradient` itself as the parameter's gradient."""
    return (
        gradient.dtype is parameter.dtype is getattr(parameter, "grad_dtype", gradient.dtype)
        and gradient.device == parameter.device
        and gradient.shape == parameter.shape
        and gradient.is_contiguous()
        and parameter.is_contiguous()
    )


def _accumulate_in_engine(parameter: Tensor, products: list[Product]) -> None:
    """Run the engine through the views between the parameter and the weights, and the parameter's hooks."""
    roots: list[GradientEdge] = []
    gradients: list[Tensor] = []
    products.reverse()  # autograd sums in the order of I
    whole = [product for product in products if product.edge is None]
    pieces = [product for product in products if product.edge is not None]
    products.clear()
    if whole:
        with torch.enable_grad():
            gate = _Gate.apply(parameter, whole)  # type: ignore[no-untyped-call]
        roots.append(get_gradient_edge(gate))
        gradients.append(gate)
    with torch.no_grad():
        while pieces:
            piece = pieces.pop()
            assert piece.edge is not None
            roots.append(GradientEdge(*piece.edge))
            gradients.append(piece.gradient())
            del piece
    run_engine(tuple(roots), tuple(gradients))


def run_engine(roots: tuple[GradientEdge, ...], gradients: tuple[Tensor, ...]) -> None:
    """Accumulate the gradients of all leaves behind `roots`.

    torch.autograd.backward would compare shapes in Python first, at a third of the cost of a small backward;
    the engine compares them again.
    """
    Variable._execution_engine.run_backward(
        roots, gradients, False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def _sum(products: list[Product]) -> Tensor:
    """The sum of the products' weight gradients, from the last one on. Empties `products`."""
    total = products.pop().gradient()
    while products:
        total += products.pop().gradient()
    return total


class _Gate(torch.autograd.Function):
    """Computes a weight's gradient inside the engine, which may then keep it without a copy.

    Autograd would have to copy a gradient that is passed in, because Python has a reference to it too.
    """

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, products: list[Product]) -> Tensor:
        ctx.products = products
        return parameter.new_empty(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        return _sum(ctx.products), None


def _owned(products: Sequence[Product]) -> Sequence[Product]:
    """The products, with a copy of each dy that has another user.

    A parameter's gradient may share the memory of a dy (autograd passes gradients on without a copy), and the
    next microbatch's gradient is added to it in place. If dy is a view, its base has dy as a user, so
    autograd never makes the base a gradient.
    """
    shared = []
    for product in products:
        storage = product.dy.untyped_storage()
        if _use_count(storage._cdata) > 2 + product.dy._is_view():  # `storage`, dy, and the base of dy
            shared.append(product)
    if not shared:
        return products
    holders: dict[int, set[int]] = {}
    for product in products:
        for tensor in (product.x, product.dy):
            holders.setdefault(tensor.untyped_storage()._cdata, set()).add(id(tensor))
    copies: dict[int, Tensor] = {}
    for product in shared:
        storage = product.dy.untyped_storage()
        ours = 1 + len(holders[storage._cdata]) + product.dy._is_view()
        if _use_count(storage._cdata) > ours and id(product.dy) not in copies:
            copies[id(product.dy)] = product.dy.clone()
    return [_with_copy(product, copies) for product in products]


def _with_copy(product: Product, copies: Mapping[int, Tensor]) -> Product:
    copy = copies.get(id(product.dy))
    if copy is None:
        return product
    return product._replace(dy=copy, versions=(product.versions[0], copy._version))


_PLAIN_CONTEXT = nullcontext()


def without_autocast() -> AbstractContextManager[object]:
    """Autocast off: a step may run inside the caller's region, but a backward uses its forward's dtypes."""
    if not is_any_autocast_enabled():
        return _PLAIN_CONTEXT
    stack = ExitStack()
    for device in ("cpu", "cuda"):
        stack.enter_context(torch.autocast(device, enabled=False))
    return stack


def is_hooked(tensor: Tensor) -> bool:
    """Whether a hook reads its gradient, and so must see all of it, with what other ops add in I."""
    return bool(tensor._backward_hooks) or bool(tensor._post_accumulate_grad_hooks)
