"""Backwards of a stage: whole, or split into input gradients (I) and weight gradients (W).

A root of a graph is autograd's own gradient edge: the node that made an output, and which of its outputs.
With an edge in place of the tensor, the output's storage is freed as soon as it has been sent, unless the
graph saved it.

`input_backward` computes the gradients that other ranks wait for. The rest, which it defers, runs when the
schedule has time for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from penstock.batch.payload import Payload
from penstock.private import FunctionBase
from penstock.runtime.split_backward.deferred import Deferred, run_engine, without_autocast
from penstock.runtime.split_backward.recording import Tape


class Live(NamedTuple):
    """One live activation: its inputs, and the roots of its graph.

    roots: one for each output that gets a gradient; None where the output needs none
    tape: of a forward under `deferring`
    """

    inputs: tuple[Tensor, ...]
    roots: tuple[GradientEdge | None, ...]
    tape: Tape | None = None


def leaves(received: Payload) -> tuple[Tensor, ...]:
    """The received tensors, which are in no graph yet, as the start of one."""
    pairs = zip(received.tensors, received.specs.carrying, strict=True)
    return tuple([tensor.requires_grad_(carries) for tensor, carries in pairs])


def hold(
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    tape: Tape | None = None,
    carrying: Sequence[bool] | None = None,
) -> Live:
    """The live activation of a forward.

    Args:
        tape: of the forward, if it ran under `deferring`.
        carrying: which outputs get a gradient; None: all that can have one.
    """
    if carrying is None:
        carrying = [output.is_floating_point() or output.is_complex() for output in outputs]
    roots = [_edge(output) for output, carries in zip(outputs, carrying, strict=True) if carries]
    return Live(tuple(inputs), tuple(roots), tape)


def _edge(output: Tensor) -> GradientEdge | None:
    node = output.grad_fn
    # get_gradient_edge also makes the token that keeps the graph of a Python node alive; others need none
    if node is None or isinstance(node, FunctionBase):
        return get_gradient_edge(output) if output.requires_grad else None
    return GradientEdge(node, output.output_nr)


def whole_backward(live: Live, gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """B: accumulate every parameter's gradient; return the gradients of the inputs that have one, in order.

    Args:
        gradients: for each output that gets one, in order.
    """
    roots, paired = _pair(live, gradients)
    if live.tape is None:
        _run(roots, paired)
    else:
        with live.tape.replaying():
            _run(roots, paired)
    return _input_gradients(live)


def input_backward(live: Live, gradients: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], Deferred]:
    """I: `whole_backward` without the weight gradients that can be deferred. Returns input gradients, and W.

    Everything that W does not need is freed. Without a tape nothing is deferred.
    """
    if live.tape is None:
        return whole_backward(live, gradients), Deferred()
    roots, paired = _pair(live, gradients)
    products = live.tape.begin_collecting(roots, live.inputs)
    try:
        with live.tape.replaying():
            _run(roots, paired)
    finally:
        live.tape.end_collecting()
    return _input_gradients(live), Deferred(products)


def _pair(live: Live, gradients: Sequence[Tensor]) -> tuple[tuple[GradientEdge, ...], tuple[Tensor, ...]]:
    """The outputs that have a gradient, and their gradients."""
    if None not in live.roots and len(live.roots) == len(gradients):  # the usual case
        return cast(tuple[GradientEdge, ...], live.roots), tuple(gradients)
    paired = [(root, grad) for root, grad in zip(live.roots, gradients, strict=True) if root is not None]
    return tuple([root for root, _ in paired]), tuple([grad for _, grad in paired])


def _run(roots: tuple[GradientEdge, ...], gradients: tuple[Tensor, ...]) -> None:
    if roots:
        with without_autocast():
            run_engine(roots, gradients)


def _input_gradients(live: Live) -> tuple[Tensor, ...]:
    return tuple(
        [
            torch.zeros_like(received) if received.grad is None else received.grad
            for received in live.inputs
            if received.requires_grad
        ]
    )
