"""The norm of all gradients, over all stages and all ranks of the mesh."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial

from penstock.runtime.spread import own, whole
from penstock.runtime.world import World


def global_norm(gradients: Sequence[Tensor], world: World) -> float:
    """Of the gradients of all ranks; sharded ones count whole. The same number on every rank. Collective."""
    squares = torch.zeros(1, dtype=torch.float64, device=world.device)
    for holders, each in _held(gradients, world).items():
        norms = torch.stack([norm.to(world.device) for norm in torch._foreach_norm(each)])
        squares += norms.double().square().sum() / holders
    squares = world.sums.everywhere(squares)
    vectors = [squares if place == 0 else torch.zeros_like(squares) for place in range(len(world.ranks))]
    return float(torch.stack(world.transport.exchange(vectors)).sum().sqrt())


def _held(gradients: Sequence[Tensor], world: World) -> dict[int, list[Tensor]]:
    """What this rank holds of them, by the number of ranks beside the pipeline that hold the very same."""
    beside = max(1, len(world.sums.ranks))
    held: dict[int, list[Tensor]] = {}
    for gradient in gradients:
        if not isinstance(gradient, DTensor):
            held.setdefault(beside, []).append(gradient)
        elif world.sums.ranks.issuperset(gradient.device_mesh.mesh.flatten().tolist()):
            held.setdefault(beside // _parts(gradient), []).append(gradient.to_local())
        else:  # of a mesh of the user's own
            held.setdefault(beside, []).append(whole(torch.linalg.vector_norm(gradient)))
    return held


def _parts(gradient: DTensor) -> int:
    """How many different parts of it there are, each on ranks of its own."""
    mesh, placements = gradient.device_mesh, gradient.placements
    assert not any(isinstance(placement, Partial) for placement in placements), "a sum not yet made"
    return math.prod(mesh.size(dim) for dim, each in enumerate(placements) if not each.is_replicate())


def scale_(gradients: Sequence[Tensor], factor: float) -> None:
    torch._foreach_mul_([own(gradient) for gradient in gradients], factor)
