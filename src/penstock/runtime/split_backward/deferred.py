"""Deferred weight gradients: the half of a zero-bubble backward that needs no graph.

W needs x and dy of each product that I deferred (recording.py), and neither the graph nor the weight's
values. So I frees everything else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from penstock.runtime.split_backward.products import Form

# (node, which of its inputs), as in `Node.next_functions`
Edge = tuple[Node, int]

LEAF = "torch::autograd::AccumulateGrad"
CAST = "ToCopyBackward0"
PLAIN = (Tensor, nn.Parameter)  # subclasses (DTensor, quantised weights) have products of their own


class Product(NamedTuple):
    """A deferred weight gradient, with the versions that x and dy had in I.

    edge: where the gradient enters: the parameter, or the views that made the weight of it
    counts: whether x takes memory; a parameter is held anyway
    """

    parameter: Tensor
    edge: Edge
    x: Tensor
    dy: Tensor
    versions: tuple[int, int]
    counts: bool
    form: Form

    @property
    def is_whole(self) -> bool:
        """Whether the weight is the parameter itself."""
        return self.edge[0].name() == LEAF

    def gradient(self) -> Tensor:
        self._check()
        return self.form.weight_gradient(self.x, self.dy)

    def add_to(self, gradient: Tensor) -> None:
        self._check()
        if self.form.add_weight_gradient is None:
            gradient += self.form.weight_gradient(self.x, self.dy)
        else:
            self.form.add_weight_gradient(gradient, self.x, self.dy)

    def _check(self) -> None:
        if (self.x._version, self.dy._version) != self.versions:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace "
                f"operation between I and W: the activation {list(self.x.shape)} that entered a product with "
                f"a weight, or the gradient {list(self.dy.shape)} of what came out. Modify a copy of it, or "
                "take a schedule without W"
            )


class PutOff(NamedTuple):
    """How much the I of a microbatch put off.

    flops: of the weight gradients, by the id of their parameter; rows: of the longest product's x
    """

    flops: Mapping[int, int]
    rows: int

    def after(self, first: PutOff | None) -> PutOff:
        """`first`, with the weights that only a later microbatch uses: one of images, or of other experts."""
        return self if first is None else PutOff({**self.flops, **first.flops}, first.rows or self.rows)

    @property
    def total(self) -> int:
        return sum(self.flops.values())


class Deferred:
    """The work that an I leaves for its W.

    nbytes: bytes held only for W, each storage counted once, parameters left out; 0 after `run`
    """

    def __init__(self, products: Sequence[Product] = ()) -> None:
        groups: dict[int, list[Product]] = {}
        for product in _owned(products):
            groups.setdefault(id(product.parameter), []).append(product)
        self._groups = list(groups.values())[::-1]  # taken from the end: in I's order
        storages = {
            storage._cdata: storage.nbytes()
            for group in self._groups
            for product in group
            for tensor in ((product.x, product.dy) if product.counts else (product.dy,))
            for storage in (tensor.untyped_storage(),)
        }
        self.nbytes = sum(storages.values())

    @property
    def put_off(self) -> PutOff:
        flops: Counter[int] = Counter()
        rows = [0]
        for product in (product for group in self._groups for product in group):
            flops[id(product.parameter)] += 2 * product.x.numel() * product.dy.shape[-1]
            rows.append(product.x.numel() // product.x.shape[-1])
        return PutOff(flops, max(rows))

    def run(self) -> None:
        """Accumulate the deferred weight gradients, and free all that was held.

        A parameter's pieces and uses enter together, so that it accumulates once, as in a whole backward; one
        parameter after the other, so that one new gradient at a time is held. Raises RuntimeError where
        what was held has been modified in place since I.
        """
        with without_autocast():
            while self._groups:
                _accumulate(self._groups.pop())
        self.nbytes = 0


def _accumulate(products: list[Product]) -> None:
    """Everything for one parameter. Empties `products`, so that x and dy are freed after their use."""
    parameter = products[0].parameter
    if not parameter.requires_grad:  # frozen since: autograd drops its gradient as well
        products.clear()
        return
    if _may_add(parameter) and _enter_through_one_cast(products):
        products.reverse()
        with torch.no_grad():
            parameter.grad += _sum(products)  # type: ignore[operator]
        return
    whole = [products.pop(index) for index in reversed(range(len(products))) if products[index].is_whole]
    if not products and _may_add(parameter):
        assert parameter.grad is not None
        with torch.no_grad():
            while whole:
                whole.pop().add_to(parameter.grad)
        return
    roots: list[GradientEdge] = []
    gradients: list[Tensor] = []
    if whole:
        with torch.enable_grad():
            gate = _Gate.apply(parameter, whole)  # type: ignore[no-untyped-call]
        roots.append(get_gradient_edge(gate))
        gradients.append(gate)
    products.reverse()  # autograd sums in the order of I
    with torch.no_grad():
        while products:
            piece = products.pop()
            roots.append(GradientEdge(*piece.edge))
            gradients.append(piece.gradient())
            del piece
    Variable._execution_engine.run_backward(
        tuple(roots), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def _may_add(parameter: Tensor) -> bool:
    """Whether what W computes may be added directly to the gradient, without autograd.

    Not to one in half precision: autograd rounds the product, and then the sum, as two kernels do. A product
    that adds to the gradient rounds once, so that other bits come out.
    """
    gradient = parameter.grad
    return (
        gradient is not None
        and type(gradient) in PLAIN
        and gradient.layout is torch.strided
        and gradient.dtype == parameter.dtype
        and gradient.dtype in (torch.float32, torch.float64)
        and not is_hooked(parameter)
    )


def _enter_through_one_cast(products: Sequence[Product]) -> bool:
    """Whether the weight of all products is one copy of the parameter in half precision, as under autocast.

    Their sum may then be added to the gradient as it is. Autograd widens it first, which changes no value and
    is one more pass over memory.
    """
    first = products[0]
    node = first.edge[0]
    return (
        node.name() == CAST
        and node.next_functions[0][0].name() == LEAF  # type: ignore[union-attr]
        and all(product.edge[0] is node for product in products)
        and first.dy.dtype in (torch.bfloat16, torch.float16)
        and first.dy.device == first.parameter.device
    )


def _sum(products: list[Product]) -> Tensor:
    """The sum of their gradients, from the last product on. Empties `products`."""
    total = products.pop().gradient()
    while products:
        total += products.pop().gradient()
    return total


class _Gate(torch.autograd.Function):
    """Computes a weight's gradient inside the engine, which may then keep it as it is.

    A gradient that is passed in is held by Python as well, so that autograd would have to copy it.
    """

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, products: list[Product]) -> Tensor:
        ctx.products = products
        return parameter.new_empty(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        return _sum(ctx.products), None


def _owned(products: Sequence[Product]) -> Iterator[Product]:
    """The products, with a copy of each dy that something else holds as well.

    A parameter's gradient may be the very memory of a dy (autograd passes gradients on as they are), and
    the next microbatch's gradient is added to it in place.
    """
    holders: dict[int, set[int]] = {}
    for product in products:
        for tensor in (product.x, product.dy):
            holders.setdefault(tensor.untyped_storage()._cdata, set()).add(id(tensor))
    copies: dict[int, Tensor] = {}
    for product in products:
        storage = product.dy.untyped_storage()
        ours = len(holders[storage._cdata]) + 1  # `storage` counts as well
        if torch._C._storage_Use_Count(storage._cdata) > ours and id(product.dy) not in copies:
            copies[id(product.dy)] = product.dy.clone()
    for product in products:
        if (copy := copies.get(id(product.dy))) is not None:
            product = product._replace(dy=copy, versions=(product.versions[0], copy._version))
        yield product


_PLAIN_CONTEXT = nullcontext()


def without_autocast() -> AbstractContextManager[object]:
    """No autocast: a step runs inside the caller's, and each op's backward works in its forward's dtypes."""
    if not torch._C._is_any_autocast_enabled():
        return _PLAIN_CONTEXT
    stack = ExitStack()
    for device in ("cpu", "cuda"):
        stack.enter_context(torch.autocast(device, enabled=False))
    return stack


def is_hooked(tensor: Tensor) -> bool:
    """Whether a hook looks at its gradient: it must see all of it, with what other ops add in I."""
    return bool(tensor._backward_hooks) or bool(tensor._post_accumulate_grad_hooks)
