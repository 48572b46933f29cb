"""Weight gradients that were put off: the half of zero-bubble schedules that needs no graph.

What I put off (tape.py) needs x and dy of each product, and neither the graph nor the weight's values, so
that I frees all else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from penstock.runtime.split_backward.products import Form

# (node, which of its inputs), as `Node.next_functions` has them
Edge = tuple[Node, int]

LEAF = "torch::autograd::AccumulateGrad"
PLAIN = (Tensor, nn.Parameter)  # subclasses (DTensor, quantised weights) have products of their own


class Product(NamedTuple):
    """A weight gradient that was put off, with the versions that x and dy had then."""

    parameter: Tensor
    edge: Edge  # where the gradient enters: the parameter, or the views that made the weight of it
    x: Tensor
    dy: Tensor
    versions: tuple[int, int]
    counts: bool  # whether x is anything but a parameter, which is held anyway
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


class Deferred:
    """What W has to do after an I.

    nbytes: bytes held for nothing but W, storages counted once, parameters left out; 0 after `run`
    """

    def __init__(self, products: Sequence[Product] = ()) -> None:
        groups: dict[int, list[Product]] = {}
        for product in _owned(products):
            groups.setdefault(id(product.parameter), []).append(product)
        self._groups = list(groups.values())[::-1]  # taken from the end: in I's order
        self.nbytes = self._count()

    def _count(self) -> int:
        storages = {
            storage._cdata: storage.nbytes()
            for group in self._groups
            for product in group
            for tensor in ((product.x, product.dy) if product.counts else (product.dy,))
            for storage in (tensor.untyped_storage(),)
        }
        return sum(storages.values())

    def run(self) -> None:
        """Accumulate the weight gradients that were put off, and let all that was held go.

        Each parameter's pieces and uses enter together, so that it accumulates once, as in a whole backward;
        one parameter after the other, so that one gradient at a time is held beside the accumulated ones.
        Raises RuntimeError where what was held has been modified in place since I.
        """
        with without_autocast():
            while self._groups:
                _accumulate(self._groups.pop())
        self.nbytes = 0


def _accumulate(products: list[Product]) -> None:
    """All that goes to one parameter. `products` is emptied, so that x and dy go as soon as they are used."""
    parameter = products[0].parameter
    if not parameter.requires_grad:  # frozen since: autograd drops its gradient as well
        products.clear()
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
    products.reverse()  # autograd sums up in the order in which I came by
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
    """Whether a product may go straight into the gradient: a pass over memory less than by way of autograd.

    Half precision is rounded twice by autograd, and so here.
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


class _Gate(torch.autograd.Function):
    """Computes a weight's gradient within the engine, which then may keep it as it is.

    One that is handed in is held by Python as well, so that autograd would have to store a copy.
    """

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, products: list[Product]) -> Tensor:
        ctx.products = products
        return parameter.new_empty(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        products: list[Product] = ctx.products
        total = products.pop().gradient()
        while products:
            total += products.pop().gradient()
        return total, None


def _owned(products: Sequence[Product]) -> Iterator[Product]:
    """The products, with a copy of each dy that somebody else holds as well.

    A parameter's gradient may have become the very memory of a dy (autograd gives gradients away where a sum
    passes them on as they are), and the next microbatch's is added to it in place.
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
    """A step's backwards lie within the caller's autocast, as its forwards do, and are not to be cast.

    Each op's backward works in the dtypes of its forward.
    """
    if not torch._C._is_any_autocast_enabled():
        return _PLAIN_CONTEXT
    stack = ExitStack()
    for device in ("cpu", "cuda"):
        stack.enter_context(torch.autocast(device, enabled=False))
    return stack


def is_hooked(tensor: Tensor) -> bool:
    """Whether someone looks at its gradient, and so at the whole one, with what other ops add in I."""
    return bool(tensor._backward_hooks) or bool(tensor._post_accumulate_grad_hooks)
