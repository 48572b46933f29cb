"""Forward results as the roots of a later backward, without the tensors themselves.

A root is autograd's own gradient edge: the node that made the output, and which output it was. Holding
the edge in place of the tensor lets the output's storage go as soon as it has been sent, unless the
graph saved it, and needs no trick on its data.

A backward is whole, or split in two: `input_backward` gives the gradients that other ranks wait for, and what
it puts off is run when the rank has nothing better to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge, get_gradient_edge

from penstock.batch.payload import Payload
from penstock.runtime.split_backward.deferred import Deferred, without_autocast
from penstock.runtime.split_backward.recording import Tape

# nodes whose graph lives on by a token, which get_gradient_edge makes; of all others the edge is at hand
_IN_PYTHON: type = torch._C._FunctionBase


class Live(NamedTuple):
    """One live activation: what came in, and the roots of its graph."""

    inputs: tuple[Tensor, ...]
    roots: tuple[GradientEdge | None, ...]  # of each output that gets a gradient; None where it needs none
    tape: Tape | None = None  # of a forward under `deferring`


def can_carry(tensor: Tensor) -> bool:
    """Whether its dtype can have a gradient."""
    return tensor.is_floating_point() or tensor.is_complex()


def leaves(received: Payload) -> tuple[Tensor, ...]:
    """What was received, which no graph holds yet, as the start of one."""
    pairs = zip(received.tensors, received.specs.carrying, strict=True)
    return tuple([tensor.requires_grad_(carries) for tensor, carries in pairs])


def hold(
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    tape: Tape | None = None,
    carrying: Sequence[bool] | None = None,
) -> Live:
    """tape: of the forward, where it ran under `deferring`

    carrying: which of the outputs were said to get a gradient; None: each one that can
    """
    carrying = list(map(can_carry, outputs)) if carrying is None else carrying
    roots = [_edge(output) for output, carries in zip(outputs, carrying, strict=True) if carries]
    return Live(tuple(inputs), tuple(roots), tape)


def _edge(output: Tensor) -> GradientEdge | None:
    node = output.grad_fn
    if node is None or isinstance(node, _IN_PYTHON):
        return get_gradient_edge(output) if output.requires_grad else None
    return GradientEdge(node, output.output_nr)


def whole_backward(live: Live, gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Accumulate every parameter's gradient; return those of the inputs that have one, in order.

    gradients: of each output that was said to get one, in order.
    """
    roots, given = _pair(live, gradients)
    if live.tape is None:
        _run(roots, given)
    else:
        with live.tape.replaying():
            _run(roots, given)
    return _input_gradients(live)


def input_backward(live: Live, gradients: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], Deferred]:
    """I: `whole_backward`, less the weight gradients that can be put off, and W, which accumulates those.

    Everything that W does not need is freed. Without a tape nothing can be put off.
    """
    if live.tape is None:
        return whole_backward(live, gradients), Deferred()
    roots, given = _pair(live, gradients)
    with live.tape.collecting(roots, live.inputs) as products, live.tape.replaying():
        _run(roots, given)
    return _input_gradients(live), Deferred(products)


def _pair(live: Live, gradients: Sequence[Tensor]) -> tuple[tuple[GradientEdge, ...], tuple[Tensor, ...]]:
    """The outputs that have a gradient, and their gradients."""
    if None not in live.roots and len(live.roots) == len(gradients):  # as a rule
        return cast(tuple[GradientEdge, ...], live.roots), tuple(gradients)
    paired = [(root, grad) for root, grad in zip(live.roots, gradients, strict=True) if root is not None]
    return tuple([root for root, _ in paired]), tuple([grad for _, grad in paired])


def _run(roots: tuple[GradientEdge, ...], gradients: tuple[Tensor, ...]) -> None:
    if roots:
        # Not through torch.autograd.backward: it first compares shapes in Python, at a third of the cost of a
        # small backward, which the engine then does again.
        with without_autocast():
            Variable._execution_engine.run_backward(
                roots, gradients, False, False, (), allow_unreachable=True, accumulate_grad=True
            )


def _input_gradients(live: Live) -> tuple[Tensor, ...]:
    return tuple(
        [
            torch.zeros_like(received) if received.grad is None else received.grad
            for received in live.inputs
            if received.requires_grad
        ]
    )
