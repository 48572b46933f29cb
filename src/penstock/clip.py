"""The norm of all gradients, over all stages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from penstock.runtime.world import World


def global_norm(gradients: Sequence[Tensor], world: World) -> float:
    """Of the gradients of all ranks; sharded ones count whole. The same number on every rank. Collective."""
    whole, sharded = _sorted(gradients)
    norms = [*torch._foreach_norm(whole)] if whole else []
    norms += [torch.linalg.vector_norm(gradient).full_tensor() for gradient in sharded]
    squares = torch.zeros(1, dtype=torch.float64, device=world.device)
    for norm in norms:
        squares += norm.to(world.device).double().square()
    vectors = [squares if place == 0 else torch.zeros_like(squares) for place in range(len(world.ranks))]
    return float(torch.stack(world.transport.exchange(vectors)).sum().sqrt())


def scale_(gradients: Sequence[Tensor], factor: float) -> None:
    for alike in filter(None, _sorted(gradients)):
        torch._foreach_mul_(alike, factor)


def _sorted(gradients: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Whole ones and sharded ones, which torch does not take together."""
    whole = [gradient for gradient in gradients if not isinstance(gradient, DTensor)]
    return whole, [gradient for gradient in gradients if isinstance(gradient, DTensor)]
