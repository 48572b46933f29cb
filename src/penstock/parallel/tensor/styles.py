"""The styles of tensor parallelism: wrappers around the forward of a module whose weights are DTensors.

A module's forward gets plain tensors only: this rank's shard of each weight, and activations that are whole,
or this rank's part along their last dimension (its heads) or along the sequence. DTensor sums gradients in
the backward of `redistributed`.

| style of transformers' plans | weight dimension | module | takes and returns whole values |
|---|---|---|---|
| colwise | 0 | linear | |
| colwise_gather_output | 0 | linear | yes |
| rowwise | 1 | linear | |
| rowwise_split_input | 1 | linear | yes |
| embedding_rowwise | 0 | embedding | yes |
| mla_kv_a_proj | | linear | |
| replicated_with_grad_allreduce | | any | |
| replicate, local_params | | any | |
| moe_tp_experts | | experts stay whole | |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from penstock.batch import deferred_logits
from penstock.errors import BatchError, ModelError
from penstock.parallel.mesh import refuse_second_derivative


class Style(NamedTuple):
    """How tensor parallelism treats one module.

    dimension: the weight's sharded dimension. The bias is sharded if that is 0, and whole if it is 1
    kind: the type of module for which the style is exact; None for any
    closed: whether the module takes and returns whole values, so that an unsharded module is exact as well
    """

    dimension: int | None = None
    kind: type[nn.Module] | None = None
    closed: bool = False


COLUMNS, COLUMNS_GATHERED = "colwise", "colwise_gather_output"
ROWS, ROWS_SPLIT = "rowwise", "rowwise_split_input"
VOCABULARY, COMPRESSED, PARTIAL = "embedding_rowwise", "mla_kv_a_proj", "replicated_with_grad_allreduce"
EXPERTS = "moe_tp_experts"
STYLES = {
    COLUMNS: Style(0, nn.Linear),
    COLUMNS_GATHERED: Style(0, nn.Linear, closed=True),
    ROWS: Style(1, nn.Linear),
    ROWS_SPLIT: Style(1, nn.Linear, closed=True),
    VOCABULARY: Style(0, nn.Embedding, closed=True),
    COMPRESSED: Style(None, nn.Linear),
    PARTIAL: Style(),
    "replicate": Style(),
    "local_params": Style(),
}
FORMER_NAMES = {"colwise_rep": COLUMNS_GATHERED, "rowwise_rep": ROWS_SPLIT}

Wrapper = Callable[..., Any]  # called with the module, the forward to run, and its arguments

WHOLE, PARTIAL_SUMS, SEQUENCE = Replicate(), Partial(), Shard(1)


def redistributed(
    x: Tensor, mesh: DeviceMesh, have: Placement, want: Placement, grad: Placement | None = None
) -> Tensor:
    """Redistribute `x` over `mesh` from placement `have` to `want`; return this rank's part. Even parts only.

    Args:
        grad: placement of the result's gradient; None: that of the result, and equal on all ranks if whole
    """
    placed = DTensor.from_local(x, mesh, (have,), run_check=False).redistribute(placements=(want,))
    part: Tensor = _Free.apply(placed.to_local(grad_placements=None if grad is None else (grad,)))  # type: ignore[no-untyped-call]
    return part


class _Free(torch.autograd.Function):
    """The same values but not a view: models modify in place, which a view of a DTensor refuses."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        refuse_second_derivative("tp")
        return gradients[0]


def local_input(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Whole values that each rank uses for its own heads: their gradients are partial sums."""
    return redistributed(x, mesh, WHOLE, WHOLE, grad=PARTIAL_SUMS)


class SharedInput:
    """Around a module whose projections share an input: the input's gradients are summed in one reduction."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._known: dict[int, tuple[Tensor, Tensor]] | None = None  # id -> input, and what projections get

    def expect(self, x: Tensor, entering: Tensor) -> None:
        """In the next call, pass `entering` to projections of `x`."""
        self._known = {id(x): (x, entering)}

    def __call__(self, module: nn.Module, call: Wrapper, *args: Any, **kwargs: Any) -> Any:
        self._known = self._known or {}
        try:
            return call(*args, **kwargs)
        finally:
            self._known = None

    def enter(self, x: Tensor) -> Tensor:
        if self._known is None:  # a projection is called outside of its module
            return local_input(x, self._mesh)
        if id(x) not in self._known:
            self._known[id(x)] = x, local_input(x, self._mesh)
        return self._known[id(x)][1]


# Wrappers around the forward of a module. Their first parameters are fixed when the module is sharded; then
# come the module, the forward to call, and its arguments.


def columns(
    mesh: DeviceMesh, shared: SharedInput, gathered: bool, module: nn.Module, call: Wrapper, x: Tensor
) -> Tensor:
    """Around a linear layer with sharded outputs. gathered: whether to gather the outputs at once"""
    y: Tensor = call(shared.enter(x))
    return redistributed(deferred_logits.whole(y), mesh, Shard(y.ndim - 1), WHOLE) if gathered else y


def rows(mesh: DeviceMesh, split: bool, module: nn.Module, call: Wrapper, x: Tensor) -> Tensor:
    """Around a linear layer with sharded inputs. split: whether its inputs are whole, and to be split"""
    if split:
        x = redistributed(x, mesh, WHOLE, Shard(x.ndim - 1))
    bias = module._parameters.get("bias")
    with _replaced(module._parameters, "bias", None):  # or each rank would add the bias
        y = redistributed(call(x), mesh, PARTIAL_SUMS, WHOLE)
    return y + bias.to_local() if isinstance(bias, DTensor) else y


def vocabulary(mesh: DeviceMesh, module: nn.Module, call: Wrapper, ids: Tensor) -> Tensor:
    """Around an embedding whose vocabulary is sharded."""
    rank = mesh.get_local_rank()
    count = module._parameters["weight"].shape[0] // mesh.size()  # type: ignore[union-attr]
    start = rank * count
    # The first and the last rank look up ids outside of the vocabulary, to get torch's own error.
    foreign = ids < start if rank else torch.zeros_like(ids, dtype=torch.bool)
    if rank < mesh.size() - 1:
        foreign = foreign | (ids >= start + count)
    padding = vars(module)["padding_idx"]  # the gradient of this row stays zero
    own_padding = padding - start if padding is not None and start <= padding < start + count else None
    with _replaced(vars(module), "padding_idx", own_padding):
        y: Tensor = call((ids - start).masked_fill(foreign, 0))
    return redistributed(y.masked_fill(foreign.unsqueeze(-1), 0), mesh, PARTIAL_SUMS, WHOLE)


def compressed(mesh: DeviceMesh, width: int, module: nn.Module, call: Wrapper, x: Tensor) -> Tensor:
    """Around a whole projection to compressed keys and values.

    The last `width` outputs, with rotary positions, go directly to each rank's heads. The others are the
    input of a projection, which sums their gradients.
    """
    y: Tensor = call(x)
    return torch.cat([y[..., :-width], local_input(y[..., -width:], mesh)], dim=-1)


def whole_sequence(
    mesh: DeviceMesh, shared: SharedInput | None, module: nn.Module, call: Wrapper, *args: Any, **kwargs: Any
) -> Any:
    """Around a part of a layer that gets the whole sequence: each rank keeps its tokens of the result."""

    def gather(x: Tensor) -> Tensor:
        placed = DTensor.from_local(x, mesh, (SEQUENCE,), run_check=False)
        placed = placed.redistribute(placements=(WHOLE,))
        whole = placed.to_local()
        if shared is not None:  # the projections' gradients are summed and sharded at once
            shared.expect(whole, placed.to_local(grad_placements=(PARTIAL_SUMS,)))
        return whole

    def share(y: Tensor) -> Tensor:
        _check_hidden(f"the result of a {type(module).__name__}", y, like=whole)
        return redistributed(y, mesh, WHOLE, SEQUENCE)

    args, kwargs = _with_hidden(gather, args, kwargs)
    whole = args[0] if args else kwargs["hidden_states"]
    return _with_first(share, call(*args, **kwargs))


def ends(
    mesh: DeviceMesh, first: bool, last: bool, module: nn.Module, call: Wrapper, *args: Any, **kwargs: Any
) -> Any:
    """Around a layer: split the first layer's input by tokens, and gather the last layer's output."""

    def share(hidden: Tensor) -> Tensor:
        _check_hidden("the input of the first layer", hidden)
        check_length(hidden.shape[1], mesh.size())
        return redistributed(hidden, mesh, WHOLE, SEQUENCE)

    if first:
        args, kwargs = _with_hidden(share, args, kwargs)
    result = call(*args, **kwargs)
    return _with_first(lambda y: redistributed(y, mesh, SEQUENCE, WHOLE), result) if last else result


def check_length(length: int, ranks: int) -> None:
    """Raise BatchError unless ranks can shard a sequence of this length.

    A single token per rank is refused: with a wrong shape it would be broadcast without an error.
    """
    if length % ranks or length == ranks:
        fitting = max(2, -(-length // ranks)) * ranks
        raise BatchError(
            f"a sequence of {length} tokens with sequence_parallel over tp={ranks}",
            "each rank takes the same number of tokens, two or more",
            f"Pad to a length of {fitting}, or set sequence_parallel to False",
        )


def _check_hidden(named: str, hidden: Tensor, like: Tensor | None = None) -> None:
    """Raise ModelError unless the tokens are in dimension 1, along which they are sharded."""
    if hidden.ndim != 3 or (like is not None and hidden.shape[:2] != like.shape[:2]):
        raise ModelError(
            f"{named}, of shape {list(hidden.shape)}, with sequence_parallel",
            "hidden states of (rows, tokens, width) are sharded along their second dimension",
            "Set sequence_parallel to False for this model",
        )


def _with_hidden(
    change: Callable[[Tensor], Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with changed hidden states: the first argument, or `hidden_states`."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}


def _with_first(change: Callable[[Tensor], Tensor], result: Any) -> Any:
    """The result of a module with changed hidden states, which come first."""
    return change(result) if isinstance(result, Tensor) else (change(result[0]), *result[1:])


@contextmanager
def _replaced(values: dict[str, Any], name: str, value: object) -> Iterator[None]:
    before = values.get(name)
    values[name] = value
    try:
        yield
    finally:
        values[name] = before
