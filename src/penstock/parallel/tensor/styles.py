"""Ways to run a module that holds DTensors on the `tp` axis: what is done around its own forward.

A module's forward meets plain tensors only: this rank's piece of each weight, and activations that are whole,
or this rank's part along their last dimension (its heads) or along the sequence. What has to be made of the
gradients is told to DTensor, which does it where they come by (`moved`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from penstock.errors import BatchError, ModelError

# Called with the module, the forward to run, and its arguments.
Way = Callable[..., Any]

WHOLE, SUMMANDS, SEQUENCE = Replicate(), Partial(), Shard(1)


def moved(
    x: Tensor, mesh: DeviceMesh, have: Placement, want: Placement, back: Placement | None = None
) -> Tensor:
    """Of `x`, laid over the mesh as `have`, this rank's piece as `want`; even pieces.

    back: how the result's gradients are laid; None: as the result, and alike on all ranks where it is whole
    """
    laid = DTensor.from_local(x, mesh, (have,), run_check=False).redistribute(placements=(want,))
    piece: Tensor = _Free.apply(laid.to_local(grad_placements=None if back is None else (back,)))  # type: ignore[no-untyped-call]
    return piece


class _Free(torch.autograd.Function):
    """The same values as nobody's view: what DTensor gives may not be modified in place, as models do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def entered(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Whole values that each rank uses for its own heads: their gradients are summands."""
    return moved(x, mesh, WHOLE, WHOLE, back=SUMMANDS)


class Entered:
    """Around a module in which several projections enter the same values: it sums their gradients up once."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._known: dict[int, tuple[Tensor, Tensor]] | None = None  # by id, with whose it is

    def expect(self, x: Tensor, inside: Tensor) -> None:
        """In the call that follows, projections that enter `x` get `inside`."""
        self._known = {id(x): (x, inside)}

    def __call__(self, module: nn.Module, call: Way, *args: Any, **kwargs: Any) -> Any:
        self._known = self._known or {}
        try:
            return call(*args, **kwargs)
        finally:
            self._known = None

    def enter(self, x: Tensor) -> Tensor:
        if self._known is None:  # called by itself
            return entered(x, self._mesh)
        if id(x) not in self._known:
            self._known[id(x)] = x, entered(x, self._mesh)
        return self._known[id(x)][1]


class Columns:
    """A linear layer of which each rank has some outputs. gathered: they are put together at once."""

    def __init__(self, mesh: DeviceMesh, shared: Entered, gathered: bool) -> None:
        self._mesh, self._shared, self._gathered = mesh, shared, gathered

    def __call__(self, module: nn.Module, call: Way, x: Tensor) -> Tensor:
        y: Tensor = call(self._shared.enter(x))
        return moved(y, self._mesh, Shard(y.ndim - 1), WHOLE) if self._gathered else y


class Rows:
    """A linear layer of which each rank has some inputs. split: they come whole."""

    def __init__(self, mesh: DeviceMesh, split: bool) -> None:
        self._mesh, self._split = mesh, split

    def __call__(self, module: nn.Module, call: Way, x: Tensor) -> Tensor:
        if self._split:
            x = moved(x, self._mesh, WHOLE, Shard(x.ndim - 1))
        bias = module._parameters.get("bias")
        with _replaced(module._parameters, "bias", None):  # else each rank would add it
            y = moved(call(x), self._mesh, SUMMANDS, WHOLE)
        return y + bias.to_local() if isinstance(bias, DTensor) else y


class Vocabulary:
    """An embedding of which each rank has the vectors of some tokens."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh, self._rank = mesh, mesh.get_local_rank()

    def __call__(self, module: nn.Module, call: Way, ids: Tensor) -> Tensor:
        rows = module._parameters["weight"].shape[0] // self._mesh.size()  # type: ignore[union-attr]
        start = self._rank * rows
        # The outermost ranks look up what is out of the vocabulary, for torch's own error.
        foreign = ids < start if self._rank else torch.zeros_like(ids, dtype=torch.bool)
        if self._rank < self._mesh.size() - 1:
            foreign = foreign | (ids >= start + rows)
        padding = vars(module)["padding_idx"]  # that row's gradient is to stay zero
        own_padding = padding - start if padding is not None and start <= padding < start + rows else None
        with _replaced(vars(module), "padding_idx", own_padding):
            y: Tensor = call((ids - start).masked_fill(foreign, 0))
        return moved(y.masked_fill(foreign.unsqueeze(-1), 0), self._mesh, SUMMANDS, WHOLE)


class Compressed:
    """A whole projection to compressed keys and values. The last `width` outputs, turned by the positions, go
    straight to each rank's heads; the others enter a projection, which sees to their gradients."""

    def __init__(self, mesh: DeviceMesh, width: int) -> None:
        self._mesh, self._width = mesh, width

    def __call__(self, module: nn.Module, call: Way, x: Tensor) -> Tensor:
        y: Tensor = call(x)
        through, straight = y[..., : -self._width], y[..., -self._width :]
        return torch.cat([through, entered(straight, self._mesh)], dim=-1)


class WholeSequence:
    """Around a part of a layer: it gets the whole sequence; of what it returns each rank keeps its own."""

    def __init__(self, mesh: DeviceMesh, shared: Entered | None) -> None:
        self._mesh, self._shared = mesh, shared

    def __call__(self, module: nn.Module, call: Way, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = _with_hidden(self._gather, args, kwargs)
        whole = args[0] if args else kwargs["hidden_states"]

        def share(y: Tensor) -> Tensor:
            _check_hidden(f"what a {type(module).__name__} returns", y, like=whole)
            return moved(y, self._mesh, WHOLE, SEQUENCE)

        return _with_first(share, call(*args, **kwargs))

    def _gather(self, x: Tensor) -> Tensor:
        laid = DTensor.from_local(x, self._mesh, (SEQUENCE,), run_check=False).redistribute(
            placements=(WHOLE,)
        )
        whole = laid.to_local()
        if self._shared is not None:  # the projections' gradients are summed up and shared out at once
            self._shared.expect(whole, laid.to_local(grad_placements=(SUMMANDS,)))
        return whole


class Ends:
    """Around a layer: between the first one's start and the last one's end each rank has its own tokens."""

    def __init__(self, mesh: DeviceMesh, first: bool, last: bool) -> None:
        self._mesh, self._first, self._last = mesh, first, last

    def __call__(self, module: nn.Module, call: Way, *args: Any, **kwargs: Any) -> Any:
        if self._first:
            args, kwargs = _with_hidden(self._share, args, kwargs)
        result = call(*args, **kwargs)
        if self._last:
            return _with_first(lambda y: moved(y, self._mesh, SEQUENCE, WHOLE), result)
        return result

    def _share(self, hidden: Tensor) -> Tensor:
        _check_hidden("what enters the first layer", hidden)
        check_length(hidden.shape[1], self._mesh.size())
        return moved(hidden, self._mesh, WHOLE, SEQUENCE)


def check_length(length: int, ranks: int) -> None:
    """Whether ranks can share out a sequence. Raises BatchError.

    A single token a rank would be spread over whole sequences where a shape does not fit, not refused.
    """
    if length % ranks or length == ranks:
        fitting = max(2, -(-length // ranks)) * ranks
        raise BatchError(
            f"a sequence of {length} tokens with sequence_parallel over tp={ranks}",
            "each rank takes the same number of tokens, two or more",
            f"Pad to a length of {fitting}, or set sequence_parallel to False",
        )


def _check_hidden(what: str, hidden: Tensor, like: Tensor | None = None) -> None:
    """Refuse what has tokens elsewhere than where they are shared out. Raises ModelError."""
    if hidden.ndim != 3 or (like is not None and hidden.shape[:2] != like.shape[:2]):
        raise ModelError(
            f"{what}, of shape {list(hidden.shape)}, with sequence_parallel",
            "hidden states of rows, tokens and width are shared out along their second dimension",
            "Set sequence_parallel to False for this model",
        )


def _with_hidden(
    change: Callable[[Tensor], Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with other hidden states: what comes first, or goes by that name."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}


def _with_first(change: Callable[[Tensor], Tensor], result: Any) -> Any:
    """What a module returned with other hidden states, which come first where there is more."""
    return change(result) if isinstance(result, Tensor) else (change(result[0]), *result[1:])


@contextmanager
def _replaced(values: dict[str, Any], name: str, value: object) -> Iterator[None]:
    held = values.get(name)
    values[name] = value
    try:
        yield
    finally:
        values[name] = held
