"""Weights that several stages hold a copy of, such as an embedding tied to the head.

The copies start alike. After each step every copy gets the sum of all their gradients, so they stay
alike under any optimizer. In the norm and in a checkpoint the first copy counts for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.runtime.transport import Transport


@dataclass(frozen=True)
class SharedWeight:
    """ranks: those that hold a copy, in order; copies: those of this process"""

    ranks: tuple[int, ...]
    copies: tuple[nn.Parameter, ...]


class SharedGradients:
    """Adds up the gradients of shared weights over one step."""

    def __init__(self, shared: Sequence[SharedWeight], transport: Transport) -> None:
        for weight in shared:
            transport.share(weight.ranks)
        self._held = [weight for weight in shared if weight.copies]
        self._shared: list[SharedWeight] = []  # those of this step: the user may freeze and unfreeze
        self._transport = transport
        self._before: list[Tensor | None] = []

    def begin_step(self) -> None:
        """Lay aside what earlier steps accumulated: it is summed already."""
        self._shared = [weight for weight in self._held if weight.copies[0].requires_grad]
        self._before = [copy.grad for weight in self._shared for copy in weight.copies]
        for weight in self._shared:
            for copy in weight.copies:
                copy.grad = None

    def restore(self) -> None:
        """After a step that failed: what earlier steps accumulated is there again."""
        earlier = iter(self._before)
        for weight in self._shared:
            for copy in weight.copies:
                copy.grad = next(earlier)
        self._before = []

    def end_step(self) -> None:
        earlier = iter(self._before)
        for weight in self._shared:
            for copy in weight.copies:
                if copy.grad is None:
                    copy.grad = torch.zeros_like(copy)
            self._transport.sum_shared(weight.ranks, [_gradient(copy) for copy in weight.copies])
            for copy in weight.copies:
                before = next(earlier)
                if before is not None:
                    _gradient(copy).add_(before)
        self._before = []


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
