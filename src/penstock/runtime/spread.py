"""Tensors that are spread over ranks (DTensors), and what becomes of them where a whole one is needed."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from penstock.runtime.sharding import sharded_weights


def own(tensor: Tensor) -> Tensor:
    """What this rank holds of it; in-place changes are changes of the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of it, on every rank that holds a part. Collective over these."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        # FSDP2 may have offloaded it, and collectives work where the mesh is
        there: DTensor = tensor.to(tensor.device_mesh.device_type)  # type: ignore[assignment]
        return there.full_tensor()


def host_copy(tensor: Tensor) -> Tensor:
    """All of it in host memory, contiguous and nobody else's, also of what lies there already."""
    held = whole(tensor)
    return torch.empty(held.shape, dtype=held.dtype, device="cpu").copy_(held.detach())


def outline(tensor: Tensor) -> Tensor:
    """Its shape and dtype without values, as if it were whole."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def give_storage(module: nn.Module, device: torch.device) -> None:
    """Memory for this rank's part of all that is on the meta device, in place, without values.

    What FSDP2 is to offload gets it in host memory, the rest on `device`.
    """
    weights = sharded_weights(module)
    offloaded = {id(weight.sharded_param) for weight in weights if weight.offload_to_cpu}
    made: dict[int, Tensor] = {}
    for part in module.modules():
        for table in (part._parameters, part._buffers):
            for name, value in table.items():
                if value is None or not value.is_meta:
                    continue
                if id(value) not in made:
                    where = torch.device("cpu") if id(value) in offloaded else device
                    made[id(value)] = _with_storage(value, where)
                table[name] = made[id(value)]  # type: ignore[assignment]
    for weight in weights:
        weight.reset_sharded_param()


def _with_storage(empty: Tensor, device: torch.device) -> Tensor:
    made = torch.empty_like(empty, device=device)
    return nn.Parameter(made, empty.requires_grad) if isinstance(empty, nn.Parameter) else made


def spread_like(value: Tensor, like: Tensor) -> Tensor:
    """This rank's part of `value`, which every rank has whole, where `like` is spread and of its shape."""
    if not isinstance(like, DTensor) or value.shape != like.shape:
        return value
    placed = value.to(like.device_mesh.device_type)
    return distribute_tensor(placed, like.device_mesh, like.placements, src_data_rank=None)
