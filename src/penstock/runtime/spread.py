"""Tensors that are spread over ranks (DTensors), and what becomes of them where a whole one is needed."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def own(tensor: Tensor) -> Tensor:
    """What this rank holds of it; in-place changes are changes of the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of it, on every rank that holds a part. Collective over these."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.full_tensor()


def host_copy(tensor: Tensor) -> Tensor:
    """All of it in host memory, contiguous and nobody else's, also of what lies there already."""
    held = whole(tensor)
    return torch.empty(held.shape, dtype=held.dtype, device="cpu").copy_(held.detach())


def outline(tensor: Tensor) -> Tensor:
    """Its shape and dtype without values, as if it were whole."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def spread_like(value: Tensor, like: Tensor) -> Tensor:
    """This rank's part of `value`, which every rank has whole, where `like` is spread and of its shape."""
    if not isinstance(like, DTensor) or value.shape != like.shape:
        return value
    placed = value.to(like.device_mesh.device_type)
    return distribute_tensor(placed, like.device_mesh, like.placements, src_data_rank=None)
