"""Recording the products of a forward, so that its backward may defer their weight gradients.

While a stage's forward runs under `deferring`, each product of activations with a weight goes through one
autograd function: the modules that make products call it (modules.py), and for products elsewhere a torch
function mode sees every call (`EveryCall`). The function computes what torch would, and keeps its forward's
`Tape`. In a whole backward it gives all gradients. In a split one (`input_backward`, in backward.py) it gives
those of the activations and the bias, and defers the weight's:

    y = x Wᵀ + b        I:  dx = dy W,  db = Σ dy        W:  dW = dyᵀ x

A gradient that might be wrong later is computed at once; docs/split-backward.md lists the cases.

Under autocast every forward takes the casts of weights from its stage (casts.py): `casting` is for forwards
whose backward is not split.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, is_grad_enabled, nn
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from penstock.private import FunctionBase, get_current_function_mode_stack
from penstock.private import are_functorch_transforms_active as _in_functorch
from penstock.private import current_graph_task_id as _current_task
from penstock.private import is_any_autocast_enabled as _in_autocast
from penstock.private import len_torch_function_stack as _modes
from penstock.private import top_saved_tensors_default_hooks as _saving_hooks
from penstock.private import unwrap_if_dead as _unwrapped
from penstock.runtime.split_backward.casts import WeightCasts, cast, is_weight
from penstock.runtime.split_backward.deferred import LEAF, PLAIN, Edge, Product
from penstock.runtime.split_backward.products import CALLS, ProductForm, find

_product: Callable[..., Product] = tuple.__new__

_PLAIN = nullcontext()

# Nodes between a weight and the parameter that it is a part of: linear and without saved tensors, so that I
# may pass through them without a gradient, and W again with one.
VIEWS = frozenset(
    f"{name}Backward{version}"
    for name in ("Alias", "Permute", "Select", "Slice", "Split", "SplitWithSizes", "Squeeze", "T", "ToCopy",
                 "Transpose", "Unbind", "UnsafeView", "Unsqueeze", "View")
    for version in (0, 1)
) | {"_ToTorchTensorBackward"}  # fmt: skip


class Tape:
    """The products of one forward, and those that its backward defers.

    It is an object rather than a thread variable, as on a GPU the engine's threads run the backward.

    Args:
        weights: the casts of weights that the forward shares with other forwards.
        defers: whether a backward may be split; else torch computes the products.
        every_call: whether the mode sees every call; else only modules that ask for the tape record products.
    """

    def __init__(self, weights: WeightCasts, *, defers: bool, every_call: bool = True) -> None:
        self._weights, self._defers, self.every_call = weights, defers, every_call
        self.saw_product = False  # outside of the modules that ask for the tape
        self.modules = 0  # nested modules that ask, and whose forward runs now
        self._recomputes = self._recomputes_every_call = False
        self._hooks: object = None  # on saved tensors, at the start of the innermost of these modules
        # casts of activations, in the forward only: a part of it that runs again must keep only its own casts
        self._casts: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] | None = {}
        self._task: int | None = None  # the engine's number of the I that is running
        self._products: list[Product] = []
        self._inputs: frozenset[int] = frozenset()
        self._handles: list[RemovableHandle] = []

    # ---- in the forward

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None, form: ProductForm) -> Tensor | None:
        """The product, or None where the caller should make torch's own call."""
        if not (
            type(weight) in PLAIN
            and type(x) in PLAIN
            and (bias is None or type(bias) in PLAIN)
            and x.is_floating_point()
            and weight.layout is x.layout is torch.strided
            and not _in_functorch()
            and forward_ad._current_level < 0
        ):
            return None  # something other than autograd transforms it
        casts = form.cast and _in_autocast() and _is_cast(x.device.type)
        defers = self._defers and weight.requires_grad and is_grad_enabled()
        if defers and not weight.is_leaf:
            defers = not (weight._backward_hooks or weight.retains_grad)
        if not (defers or casts):
            return None
        if not self._recomputes:  # such hooks may run this part of the forward again in the backward
            self._recomputes = _saving_hooks(True) is not None
        if casts:
            dtype = torch.get_autocast_dtype(x.device.type)
            weight, bias = self.lowered(weight, dtype), None if bias is None else self.lowered(bias, dtype)
            if defers or (x.is_leaf and x.requires_grad):  # torch casts any other x in the same way
                x = self.lowered(x, dtype)
        if not defers:
            return form.product(x, weight, bias)
        result: Tensor = _apply(_unwrapped(x), weight, bias, form, self)
        return result

    def lowered(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Apply autocast's cast before the product, where autograd records it.

        A leaf is cast once, as by autocast, so that the gradients of all its uses are summed in `dtype`. An
        activation without a gradient is a leaf too, but its cast is not kept: it may be modified in place.
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
    def in_module(self) -> Iterator[None]:
        """Around the forward of a module that asks for the tape but makes products in its own way."""
        before, self._hooks = self._hooks, _saving_hooks(True)
        self.modules += 1
        try:
            # one mode and not two, as torch.cond compiles for the modes that are active
            with nullcontext() if self.every_call else EveryCall(self):
                yield
        finally:
            self.modules -= 1
            self._hooks = before

    def seen(self) -> None:
        """Note that the mode has recorded a product."""
        self.saw_product |= not self.modules
        if self.modules and self._recomputes and not self._recomputes_every_call:
            # a part of the module runs again by itself, without the module's forward that asks
            self._recomputes_every_call = _saving_hooks(True) != self._hooks

    def end_forward(self) -> None:
        """Stop sharing casts of activations."""
        self._casts = None

    # ---- in the backward

    def replaying(self) -> AbstractContextManager[object]:
        """Around any backward: a checkpointed forward that runs again must save the same tensors again."""
        # the engine passes torch's modes to its own threads, but no thread variable of Python
        if not self._recomputes:
            return _PLAIN
        every_call = self.every_call or self._recomputes_every_call
        return EveryCall(self) if every_call else _Carries(self)

    def begin_collecting(self, roots: Sequence[GradientEdge], inputs: Sequence[Tensor] = ()) -> list[Product]:
        """From now on, a backward from `roots` fills the returned list instead of computing weight gradients.

        inputs: of the stage. Their gradients are never deferred, even if one is the weight of a product.
        """
        self._products, self._inputs = [], frozenset(map(id, inputs))
        self._handles = [root.node.register_prehook(self._note_task) for root in roots]
        return self._products

    def end_collecting(self) -> None:
        self._task, self._products = None, []
        for handle in self._handles:
            handle.remove()

    def _note_task(self, gradients: object) -> None:
        if self._task is None:
            self._task = _current_task()

    def defer(self, weight: Tensor | Edge, x: Tensor, dy: Tensor, form: ProductForm) -> bool:
        """Defer the weight gradient. Returns False if it must be computed now.

        weight: the parameter itself, or the edge that the gradient of a tensor made from it enters
        """
        # A graph task other than I's own is a backward within the backward, which may need this gradient. One
        # with gradients enabled will be differentiated itself.
        if self._task is None or self._task != _current_task() or is_grad_enabled():
            return False
        parameter, edge = (weight, None) if isinstance(weight, Tensor) else (_parameter(weight[0]), weight)
        if (
            parameter is None
            or id(parameter) in self._inputs
            or parameter._backward_hooks
            or parameter._post_accumulate_grad_hooks
        ):
            return False
        owner = x._base
        if owner is None:
            owner = x
        counts = not isinstance(owner, nn.Parameter) or not owner.is_leaf
        versions = x._version, dy._version
        if dy.requires_grad:  # from a custom backward that enables gradients
            dy = dy.detach()
        # detached, or x would keep the graph that made it
        self._products.append(_product(Product, (parameter, edge, x.detach(), dy, versions, counts, form)))
        return True


class _Thread(threading.local):
    """The tape that this thread records on."""

    tape: Tape | None = None


thread = _Thread()


class _Recorded:
    """Inside, this thread records on `tape`. first: this is the forward itself, not a part that runs again"""

    def __init__(self, tape: Tape, *, first: bool) -> None:
        self._tape, self._first = tape, first
        self._mode = EveryCall(tape) if tape.every_call else None

    def __enter__(self) -> Tape:
        self._before, thread.tape = thread.tape, self._tape
        if self._mode is not None:
            self._mode.__enter__()  # type: ignore[no-untyped-call]
        return self._tape

    def __exit__(self, *error: Any) -> None:
        if self._mode is not None:
            self._mode.__exit__(*error)  # type: ignore[no-untyped-call]
        thread.tape = self._before
        if self._first:
            self._tape.end_forward()


class _Carries(TorchFunctionMode):
    """A mode that carries the tape, for modules that ask for it."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


class EveryCall(_Carries):
    """Records the products among all calls of torch."""

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Every call of a forward passes here, so the test that most calls fail comes first. Compiled code
        # keeps torch's own products, which the compiler must see.
        if func in CALLS and not torch.compiler.is_dynamo_compiling():
            product = find(*CALLS[func], args, kwargs or {})
            if product is not None:
                result = self.tape.product(*product)
                if result is not None:
                    self.tape.seen()
                    return result
        return func(*args, **(kwargs or {}))


def recording_again() -> AbstractContextManager[object]:
    """A context for a part of this forward when it runs again: it is recorded as it is now.

    The part may run again in a backward inside this forward, by torch.autograd.grad, for which torch has
    taken the recording mode off the stack.
    """
    tape = current()
    return nullcontext() if tape is None else _RecordingAgain(tape)


def current() -> Tape | None:
    """The tape that records now: that of this thread, or in a backward that replays, that of torch's mode."""
    if (tape := thread.tape) is not None:
        return tape
    return None if (mode := _mode()) is None else mode.tape


def _mode() -> _Carries | None:
    """The innermost of our modes on torch's stack."""
    if not _modes():
        return None
    modes = reversed(get_current_function_mode_stack())  # type: ignore[no-untyped-call]
    return next((mode for mode in modes if isinstance(mode, _Carries)), None)


class _RecordingAgain:
    def __init__(self, tape: Tape) -> None:
        self._tape, self._entered = tape, ExitStack()

    def __enter__(self) -> None:
        tape = current()
        if tape is None or (tape.every_call and _mode() is None):
            self._entered.enter_context(_Recorded(self._tape, first=False))

    def __exit__(self, *error: object) -> None:
        self._entered.close()


def deferring(weights: WeightCasts | None = None, *, every_call: bool = True) -> AbstractContextManager[Tape]:
    """A stage's forward runs under this if its backward will be split; `hold` takes the tape.

    weights: where autocast's casts of weights are kept; None keeps them with this forward
    every_call: False where the modules that make products ask for the tape (modules.py)
    """
    casts = WeightCasts() if weights is None else weights
    return _Recorded(Tape(casts, defers=True, every_call=every_call), first=True)


def casting(weights: WeightCasts, *, every_call: bool = True) -> AbstractContextManager[Tape]:
    """Any other forward of a stage runs under this where autocast is on; `hold` takes the tape."""
    return _Recorded(Tape(weights, defers=False, every_call=every_call), first=True)


def lowered(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor` in autocast's dtype, for a product that is no call of torch; a weight's cast is cached."""
    tape = current()
    return tensor.to(dtype) if tape is None else tape.lowered(tensor, dtype)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, form: ProductForm, tape: Tape
    ) -> Tensor:
        ctx.materialize_grads = (
            False  # as the functions of torch do that are named so, without calls of Python
        )
        ctx.to_save = (x, weight if ctx.needs_input_grad[0] else None)
        root: Tensor | GradientEdge | None = None
        if weight.is_leaf:
            root = weight
        elif isinstance(weight.grad_fn, FunctionBase):
            # torch 2.11 frees a Python node that made a weight, unless something keeps its edge
            root = get_gradient_edge(weight)
        ctx.of_product = form, tape, None if bias is None else bias.shape, root
        result = form.product(x, weight, bias)
        # a view made here could not be modified in place later, while torch's own result can
        return result.detach() if result._is_view() else result

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return None, None, None, None, None
        x, weight = ctx.saved_tensors
        form, tape, bias_shape, root = ctx.of_product
        of_x, _, of_bias, *_ = ctx.needs_input_grad
        dx = form.input_gradient(dy, weight) if of_x else None
        db = dy.sum_to_size(bias_shape) if of_bias else None
        later = tape.defer(ctx.next_functions[1] if root is None else root, x, dy, form)
        return dx, None if later else form.weight_gradient(x, dy), db, None, None


# `_Product.apply`, and the backward that the engine calls, without the Python functions around them
_apply: Any = super(torch.autograd.Function, _Product).apply
_Product._backward_cls.apply = _Product.backward  # type: ignore[attr-defined]


def _parameter(node: Node | None) -> Tensor | None:
    """The parameter of which the weight made by `node` is a view; None where it is computed otherwise."""
    while node is not None and node.name() in VIEWS:
        node = node.next_functions[0][0]
    if node is None or node.name() != LEAF:
        return None
    parameter: Tensor = node.variable  # type: ignore[attr-defined]
    return parameter


def _is_cast(kind: str) -> bool:
    """Whether autocast casts the factors of products on that kind of device."""
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
