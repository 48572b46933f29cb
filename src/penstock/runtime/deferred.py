"""Weight gradients that a backward may put off: the half of zero-bubble schedules that needs no graph.

While a stage's forward runs under `deferring`, each product of activations with a weight goes through one
autograd function, which computes what torch would and notes whose it is, its forward's `Tape`. In a plain
backward that function gives all gradients. In a split one (`input_backward`, in backward.py) it gives those
of the activations and the bias, and puts the weight's off:

    y = x Wᵀ + b        I:  dx = dy W,  db = Σ dy        W:  dW = dyᵀ x

What is put off needs x and dy, and neither the graph nor the weight's values, so I frees all else. What is
not sure to be right later is computed at once; docs/split-backward.md lists the cases.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Variable, forward_ad
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.overrides import TorchFunctionMode

from penstock.runtime.products import CALLS, Form, find

# (node, which of its inputs), as `Node.next_functions` has them
Edge = tuple[Node, int]

# Between a weight and the parameter that it is a piece of: linear, and without saved tensors, so that I may
# pass through them with no gradient and W once more with one.
VIEWS = frozenset(
    f"{name}Backward{number}"
    for name in ("Alias", "Permute", "Select", "Slice", "Split", "SplitWithSizes", "Squeeze", "T", "ToCopy",
                 "Transpose", "Unbind", "UnsafeView", "Unsqueeze", "View")
    for number in (0, 1)
)  # fmt: skip
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


class Tape:
    """One forward: what its products have in common, and what its backward puts off.

    An object rather than a variable of the thread: on a GPU the engine's threads run the backward.
    """

    def __init__(self) -> None:
        self._recomputes = False
        # only in the forward; a part of it that is run again is to hold no more than its own
        self._casts: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] | None = None
        self._task: int | None = None  # the engine's number of the I that is running
        self._products: list[Product] = []

    # ---- in the forward

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None, form: Form) -> Tensor:
        if form.cast and torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight = self._lower(x, dtype), self._lower(weight, dtype)
            bias = None if bias is None else self._lower(bias, dtype)
        if not self._recomputes:  # such hooks may run this part of the forward again, in the backward
            self._recomputes = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        result: Tensor = _Product.apply(x, weight, bias, form, self)  # type: ignore[no-untyped-call]
        return result

    def _lower(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """What autocast would do, where autograd sees it, as it would not inside of the product."""
        if tensor.dtype == torch.float64:
            return tensor
        if self._casts is None or not tensor.is_leaf:
            return tensor.to(dtype)
        key = id(tensor), dtype
        if (
            key not in self._casts
        ):  # kept as autocast keeps them, so that all uses sum up in the same precision
            self._casts[key] = tensor, tensor.to(dtype)  # `tensor` so that its id stays its own
        return self._casts[key][1]

    @contextmanager
    def recording(self) -> Iterator[None]:
        self._casts = {}
        try:
            with _Recording(self):
                yield
        finally:
            self._casts = None

    # ---- in the backward

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """For any backward: what activation checkpointing runs again must save what it saved before."""
        with _Recording(self) if self._recomputes else nullcontext():
            yield

    @contextmanager
    def collecting(self, roots: Sequence[GradientEdge]) -> Iterator[list[Product]]:
        """A backward from `roots` under this fills the list in place of computing weight gradients."""
        products = self._products = []
        handles = [root.node.register_prehook(self._note_task) for root in roots]
        try:
            yield products
        finally:
            self._task, self._products = None, []
            for handle in handles:
                handle.remove()

    def _note_task(self, gradients: object) -> None:
        if self._task is None:
            self._task = torch._C._current_graph_task_id()

    def put_off(self, edge: Edge, x: Tensor, dy: Tensor, form: Form) -> bool:
        """Take the weight gradient that belongs at `edge` over, unless it has to be computed now."""
        # Another task than I's own is a backward within the backward: it may ask for this very gradient.
        # One with gradients enabled will be differentiated itself.
        if self._task is None or self._task != torch._C._current_graph_task_id() or torch.is_grad_enabled():
            return False
        parameter = _parameter(edge)
        if parameter is None or _hooked(parameter):
            return False
        versions = x._version, dy._version
        counts = not isinstance(x if x._base is None else x._base, nn.Parameter)
        # detached: x would hold the graph that made it
        self._products.append(Product(parameter, edge, x.detach(), dy, versions, counts, form))
        return True


class _Recording(TorchFunctionMode):
    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Every call of a forward comes by here, so that the test that most of them fail comes first. What is
        # compiled stays whole: the compiler gets torch's own products to see.
        if func in CALLS and not torch.compiler.is_dynamo_compiling() and torch.is_grad_enabled():
            found = find(*CALLS[func], args, kwargs or {})
            if found is not None and _may_defer(*found[:3]):
                return self._tape.product(*found)
        return func(*args, **(kwargs or {}))


@contextmanager
def deferring() -> Iterator[Tape]:
    """A stage's forward runs under this if its backward may be split; `hold` gets the tape."""
    tape = Tape()
    with tape.recording():
        yield tape


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
            storage.data_ptr(): storage.nbytes()
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
        and not _hooked(parameter)
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


def _parameter(edge: Edge) -> Tensor | None:
    """The parameter that the weight at `edge` is, or is a piece of; None where it is computed otherwise."""
    node: Node | None = edge[0]
    while node is not None and node.name() in VIEWS:
        node = node.next_functions[0][0]
    if node is None or node.name() != LEAF:
        return None
    parameter: Tensor = node.variable  # type: ignore[attr-defined]
    return parameter


def _hooked(tensor: Tensor) -> bool:
    """Whether someone looks at its gradient, and so at the whole one, with what other ops add in I."""
    return bool(tensor._backward_hooks) or bool(tensor._post_accumulate_grad_hooks)


class Sharding:
    """What FSDP2 does with the gradients of `module`, if it was applied to any part of it."""

    def __init__(self, module: nn.Module) -> None:
        fsdp = sys.modules.get("torch.distributed.fsdp")  # who has not imported it does not use it
        parts = [] if fsdp is None else [p for p in module.modules() if isinstance(p, fsdp.FSDPModule)]
        self._groups = [group for p in parts for group in p._get_fsdp_state()._fsdp_param_groups]

    @property
    def reduces_in_backward(self) -> bool:
        """Whether it reduces gradients within each backward, and so before W has added its own.

        Such a stage takes whole backwards, until `set_requires_gradient_sync(False)` puts the reduction off.
        """
        return any(group.reduce_grads for group in self._groups)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, form: Form, tape: Tape) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight if ctx.needs_input_grad[0] else None)
        ctx.form, ctx.tape = form, tape
        ctx.bias_shape = None if bias is None else bias.shape
        # detached: a view made in here could not be modified in place later, as torch's own result can
        return form.product(x, weight, bias).detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        (dy,) = gradients
        if dy is None:
            return None, None, None, None, None
        x, weight = ctx.saved_tensors
        form: Form = ctx.form
        of_x, _, of_bias, *_ = ctx.needs_input_grad
        dx = form.input_gradient(dy, weight) if of_x else None
        db = dy.sum_to_size(ctx.bias_shape) if of_bias else None
        later = ctx.tape.put_off(ctx.next_functions[1], x, dy, form)
        return dx, None if later else form.weight_gradient(x, dy), db, None, None


def _may_defer(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    return (
        weight.requires_grad
        and type(weight) in PLAIN
        and type(x) in PLAIN
        and (bias is None or type(bias) in PLAIN)
        and x.is_floating_point()
        and weight.layout is x.layout is torch.strided
        and (weight.is_leaf or not (weight._backward_hooks or weight.retains_grad))
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
    )
