"""Forward results as the roots of a later backward, without the tensors themselves.

A root is autograd's own gradient edge: the node that made the output, and which output it was. Holding
the edge in place of the tensor lets the output's storage go as soon as it has been sent, unless the
graph saved it, and needs no trick on its data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge, get_gradient_edge


class Live(NamedTuple):
    """One live activation: what came in, and the roots of its graph."""

    inputs: tuple[Tensor, ...]
    roots: tuple[GradientEdge | None, ...]  # None where an output that has a gradient slot needs none


def leaf(received: Tensor) -> Tensor:
    """`received`, which no graph holds yet, as the start of one."""
    return received.requires_grad_(received.is_floating_point() or received.is_complex())


def hold(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Live:
    roots = [get_gradient_edge(output) if output.requires_grad else None
             for output in outputs if output.is_floating_point() or output.is_complex()]  # fmt: skip
    return Live(tuple(inputs), tuple(roots))


def whole_backward(live: Live, gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Accumulate every parameter's gradient; return those of the inputs that have one, in order.

    gradients: of each floating-point output, in order.
    """
    paired = [(root, grad) for root, grad in zip(live.roots, gradients, strict=True) if root is not None]
    if paired:
        roots, given = zip(*paired, strict=True)
        # Not through torch.autograd.backward: it first compares shapes in Python, at a third of the cost of a
        # small backward, which the engine then does again.
        Variable._execution_engine.run_backward(
            roots, given, False, False, (), allow_unreachable=True, accumulate_grad=True
        )
    return tuple(
        [
            torch.zeros_like(received) if received.grad is None else received.grad
            for received in live.inputs
            if received.requires_grad
        ]
    )
