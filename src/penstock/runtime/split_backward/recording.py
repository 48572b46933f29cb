"""Recording the products of a forward, so that its backward may defer their weight gradients.

While a stage's forward runs under `deferring`, each product of activations with a weight goes through one
autograd function. It computes what torch would, and keeps its forward's `Tape`. In a whole backward that
function gives all gradients. In a split one (`input_backward`, in backward.py) it gives those of the
activations and the bias, and defers the weight's:

    y = x Wᵀ + b        I:  dx = dy W,  db = Σ dy        W:  dW = dyᵀ x

A gradient that might be wrong later is computed at once; docs/split-backward.md lists the cases.

Under autocast any forward takes the casts of weights from its stage (casts.py): `casting` is for those whose
backward stays whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge, Node
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from penstock.runtime.split_backward.casts import WeightCasts, cast, is_weight
from penstock.runtime.split_backward.deferred import LEAF, PLAIN, Edge, Product, is_hooked
from penstock.runtime.split_backward.products import CALLS, Form, find

# Between a weight and the parameter that it is a piece of: linear, and without saved tensors, so that I may
# pass through them without a gradient, and W again with one.
VIEWS = frozenset(
    f"{name}Backward{number}"
    for name in ("Alias", "Permute", "Select", "Slice", "Split", "SplitWithSizes", "Squeeze", "T", "ToCopy",
                 "Transpose", "Unbind", "UnsafeView", "Unsqueeze", "View")
    for number in (0, 1)
) | {"_ToTorchTensorBackward"}  # fmt: skip


class Tape:
    """The products of one forward, and those that its backward defers.

    An object rather than a thread variable: on a GPU the engine's threads run the backward.

    Args:
        weights: the casts of weights that the forward shares with others.
        defers: whether a backward may be split; else the products stay torch's.
    """

    def __init__(self, weights: WeightCasts, *, defers: bool) -> None:
        self._weights, self._defers = weights, defers
        self._recomputes = False
        # of activations; only in the forward: a part of it that runs again must hold only its own casts
        self._casts: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] | None = None
        self._task: int | None = None  # the engine's number of the I that is running
        self._products: list[Product] = []
        self._inputs: frozenset[int] = frozenset()

    # ---- in the forward

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None, form: Form) -> Tensor | None:
        """The product, or None where torch's own call does all that there is to do."""
        defers = self._defers and _may_defer(weight)
        kind = x.device.type
        casts = form.cast and torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        if not (defers or casts):
            return None
        if not self._recomputes:  # such hooks may run this part of the forward again in the backward
            self._recomputes = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        if casts:
            dtype = torch.get_autocast_dtype(x.device.type)
            weight, bias = self.lowered(weight, dtype), None if bias is None else self.lowered(bias, dtype)
            if defers or (x.is_leaf and x.requires_grad):  # any other x torch casts in the same way
                x = self.lowered(x, dtype)
        if not defers:
            return form.product(x, weight, bias)
        result: Tensor = _Product.apply(x, weight, bias, form, self)  # type: ignore[no-untyped-call]
        return result

    def lowered(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Apply autocast's cast before the product, where autograd records it.

        A leaf is cast once, as by autocast, so that the gradients of all its uses are summed in `dtype`. An
        activation without a gradient is a leaf too, but may be modified in place, and is freed after its use.
        """
        if not tensor.is_floating_point() or tensor.dtype in (torch.float64, dtype):
            return tensor
        of_weight = is_weight(tensor)
        kept = tensor.is_leaf or of_weight
        kept = kept and (tensor.dtype == torch.float32 or not tensor.requires_grad)
        if not kept or tensor.is_inference() or not torch.is_autocast_cache_enabled():
            return tensor.to(dtype)
        if of_weight:
            return self._weights.of(tensor, dtype)
        if self._casts is None or not tensor.requires_grad:
            return tensor.to(dtype)
        key = id(tensor), dtype
        if key not in self._casts:
            self._casts[key] = tensor, cast(tensor, dtype)  # `tensor` keeps its id from being used again
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
        """For any backward: a checkpointed forward that runs again must save what it saved before."""
        with _Recording(self) if self._recomputes else nullcontext():
            yield

    @contextmanager
    def collecting(
        self, roots: Sequence[GradientEdge], inputs: Sequence[Tensor] = ()
    ) -> Iterator[list[Product]]:
        """A backward from `roots` under this fills the list instead of computing weight gradients.

        inputs: what the stage received. Its gradient is never deferred, even if it is a factor of a product.
        """
        products = self._products = []
        self._inputs = frozenset(map(id, inputs))
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

    def defer(self, edge: Edge, x: Tensor, dy: Tensor, form: Form) -> bool:
        """Take over the weight gradient that enters at `edge`, unless it must be computed now."""
        # A task other than I's own is a backward within the backward: it may ask for this very gradient.
        # One with gradients enabled will be differentiated itself.
        if self._task is None or self._task != torch._C._current_graph_task_id() or torch.is_grad_enabled():
            return False
        parameter = _parameter(edge)
        if parameter is None or id(parameter) in self._inputs or is_hooked(parameter):
            return False
        versions = x._version, dy._version
        counts = not isinstance(x if x._base is None else x._base, nn.Parameter)
        # detached: x would hold the graph that made it
        self._products.append(Product(parameter, edge, x.detach(), dy, versions, counts, form))
        return True


class _Recording(TorchFunctionMode):
    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Every call of a forward comes here, so the test that most of them fail comes first. Compiled code
        # keeps torch's own products: the compiler must see them.
        if func in CALLS and not torch.compiler.is_dynamo_compiling():
            found = find(*CALLS[func], args, kwargs or {})
            if found is not None and _is_plain(*found[:3]):
                result = self.tape.product(*found)
                if result is not None:
                    return result
        return func(*args, **(kwargs or {}))


def recording_again() -> AbstractContextManager[object]:
    """For a part of this forward that may run again: enter it there, and it is recorded as it is now.

    A backward that this forward itself runs, by torch.autograd.grad, may run the part again, and torch has
    taken the recording off the stack then.
    """
    tape = _current()
    return nullcontext() if tape is None else _RecordingAgain(tape)


def _current() -> Tape | None:
    """The tape that records now."""
    modes = reversed(_get_current_function_mode_stack())  # type: ignore[no-untyped-call]
    return next((mode.tape for mode in modes if isinstance(mode, _Recording)), None)


class _RecordingAgain:
    def __init__(self, tape: Tape) -> None:
        self._tape, self._entered = tape, ExitStack()

    def __enter__(self) -> None:
        if _current() is None:
            self._entered.enter_context(_Recording(self._tape))

    def __exit__(self, *error: object) -> None:
        self._entered.close()


@contextmanager
def deferring(weights: WeightCasts | None = None) -> Iterator[Tape]:
    """A stage's forward runs under this if its backward will be split; `hold` takes the tape.

    weights: where autocast's casts of weights are kept; None keeps them with this forward
    """
    tape = Tape(WeightCasts() if weights is None else weights, defers=True)
    with tape.recording():
        yield tape


@contextmanager
def casting(weights: WeightCasts) -> Iterator[Tape]:
    """Any other forward of a stage runs under this where autocast is on; `hold` takes the tape."""
    tape = Tape(weights, defers=False)
    with tape.recording():
        yield tape


def lowered(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor` in autocast's dtype, for a product that is no call of torch: of a weight, the stage's cast."""
    tape = _current()
    return tensor.to(dtype) if tape is None else tape.lowered(tensor, dtype)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, form: Form, tape: Tape) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight if ctx.needs_input_grad[0] else None)
        ctx.form, ctx.tape = form, tape
        ctx.bias_shape = None if bias is None else bias.shape
        # detached: a view made here could not be modified in place later, as torch's own result can
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
        later = ctx.tape.defer(ctx.next_functions[1], x, dy, form)
        return dx, None if later else form.weight_gradient(x, dy), db, None, None


def _parameter(edge: Edge) -> Tensor | None:
    """The parameter that the weight at `edge` is a view of; None where it is computed in another way."""
    node: Node | None = edge[0]
    while node is not None and node.name() in VIEWS:
        node = node.next_functions[0][0]
    if node is None or node.name() != LEAF:
        return None
    parameter: Tensor = node.variable  # type: ignore[attr-defined]
    return parameter


def _is_plain(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a product is one of plain tensors, and nothing but autograd looks at it."""
    return (
        type(weight) in PLAIN
        and type(x) in PLAIN
        and (bias is None or type(bias) in PLAIN)
        and x.is_floating_point()
        and weight.layout is x.layout is torch.strided
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
    )


def _may_defer(weight: Tensor) -> bool:
    return (
        torch.is_grad_enabled()
        and weight.requires_grad
        and (weight.is_leaf or not (weight._backward_hooks or weight.retains_grad))
    )
