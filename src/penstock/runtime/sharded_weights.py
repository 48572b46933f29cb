"""Sharded weights: what FSDP2 does around a stage, and DTensors as local shards or full tensors."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from penstock.errors import ModelError
from penstock.private import local_shape_and_offset
from penstock.runtime.device.copies import BackgroundCopies
from penstock.runtime.split_backward.modules import all_modules


def sharded_modules(module: nn.Module) -> list[Any]:
    """The modules in `module` that `fully_shard` was applied to."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not imported means not used
    return [] if fsdp is None else [part for part in all_modules(module) if isinstance(part, fsdp.FSDPModule)]


def param_groups(module: Any) -> list[Any]:
    """The groups of weights that FSDP2 gathers together in `module`; in older torch at most one."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [group for group in (state._fsdp_param_group,) if group is not None]


def check_not_replaced(module: nn.Module, stage: int) -> None:
    """Raise ModelError if a user has replaced a parameter that FSDP2 shards: FSDP2 would silently undo that.

    FSDP2 notices load_state_dict(assign=True), but not an assignment to the module's attribute.
    """
    for part in sharded_modules(module):
        for weight in (weight for group in param_groups(part) for weight in group.fsdp_params):
            info, names = weight._module_info, ("sharded_param", "_unsharded_param")
            shared = zip(info.shared_modules, info.shared_param_names, strict=True)
            places = [(info.module, info.param_name), *shared]
            for owner, name in places:
                if all(owner._parameters.get(name) is not getattr(weight, known, None) for known in names):
                    raise ModelError(
                        f"{weight._param_fqn or name} of stage {stage}, another parameter than when the "
                        "pipeline was built",
                        "dp_shard, dp_replicate and cp would put the old one back as they gather its shards",
                        "Copy values into the parameter, as pipe.load_weights() does",
                    )


class FSDPGradients:
    """How FSDP2 treats the gradients of `module`, if it was applied to any part of it."""

    def __init__(self, module: nn.Module) -> None:
        self._modules = sharded_modules(module)
        self._states = [part._get_fsdp_state() for part in self._modules]
        self._groups = [group for part in self._modules for group in param_groups(part)]

    @property
    def reduces_in_backward(self) -> bool:
        """Whether it reduces gradients within each backward, and so before W has added its own.

        Such a stage runs whole backwards, until `set_requires_gradient_sync(False)` postpones the reduction.
        """
        return any(group.reduce_grads for group in self._groups)

    @property
    def gathered(self) -> Iterator[torch.UntypedStorage]:
        """The storages of gathered weights; empty where a weight is freed."""
        for group in self._groups:
            for weight in group.fsdp_params:
                for tensor in weight.all_gather_outputs:
                    yield tensor.untyped_storage()

    @property
    def gathered_by_shard(self) -> dict[int, Tensor]:
        """The gathered parameters, by the id of the shard that is the module's parameter."""
        weights = [weight for group in self._groups for weight in group.fsdp_params]
        gathered = [weight for weight in weights if hasattr(weight, "_unsharded_param")]
        return {id(weight.sharded_param): weight._unsharded_param for weight in gathered}


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's shard of `tensor`; in-place changes change the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole of `tensor`, dequantised where it is quantised. Collective over the ranks with its shards."""
    if (original := getattr(tensor, "get_original_weight", None)) is not None:  # torchao's NF4
        dequantised: Tensor = original()
        return dequantised
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        # FSDP2 may have offloaded it, and collectives work where the mesh is
        on_mesh: DTensor = tensor.to(tensor.device_mesh.device_type)  # type: ignore[assignment]
        return on_mesh.full_tensor()


def host_copy(tensor: Tensor, copies: BackgroundCopies, *, steady: bool) -> Tensor:
    """A new, contiguous copy of all of `tensor` in host memory. Collective as `full_tensor` is.

    steady: whether only an optimizer changes the tensor; the copy may then be made in the background
    """
    full = full_tensor(tensor)
    return copies.later(full.detach()) if steady and full is tensor else copies.now(full.detach())


def meta_like(tensor: Tensor) -> Tensor:
    """A tensor without values, of the full shape and dtype of `tensor`."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def shard_like(value: Tensor, like: Tensor) -> Tensor:
    """This rank's shard of `value`, which every rank has in full, if `like` is sharded and of its shape.

    A value that is sharded itself is returned as it is. Where value and shard are on one device the result
    may be a view of the value.
    """
    if not isinstance(like, DTensor) or isinstance(value, DTensor) or value.shape != like.shape:
        return value
    mesh, placements = like.device_mesh, like.placements
    if (own := own_part(like)) is None:
        placed = value.to(mesh.device_type)
        return distribute_tensor(placed, mesh, placements, src_data_rank=None)
    shard = value[own].to(mesh.device_type)
    return DTensor.from_local(
        shard, mesh, placements, run_check=False, shape=like.shape, stride=value.stride()
    )


def own_part(tensor: Tensor) -> tuple[slice, ...] | None:
    """Which indices of the full tensor this rank's shard has, by dimension.

    None where they are no range, and for a tensor that is not sharded.
    """
    if not isinstance(tensor, DTensor):
        return None
    placements = tensor.placements
    if not all(type(kind) is Shard or isinstance(kind, Replicate) for kind in placements):
        return None
    sizes, offsets = local_shape_and_offset(tensor.shape, tensor.device_mesh, placements)
    return tuple(slice(offset, offset + size) for size, offset in zip(sizes, offsets, strict=True))


def materialize(module: nn.Module, device: torch.device) -> None:
    """Allocate this rank's part of all meta tensors in `module`, in place, without values.

    What FSDP2 will offload is allocated in host memory, the rest on `device`.
    """
    groups = [group for part in sharded_modules(module) for group in param_groups(part)]
    weights = [weight for group in groups for weight in group.fsdp_params]
    offloaded = {id(weight.sharded_param) for weight in weights if weight.offload_to_cpu}
    allocated: dict[int, Tensor] = {}
    for part in module.modules():
        for table in (part._parameters, part._buffers):
            for name, value in table.items():
                if value is None or not value.is_meta:
                    continue
                if id(value) not in allocated:
                    empty = torch.empty_like(value, device="cpu" if id(value) in offloaded else device)
                    is_parameter = isinstance(value, nn.Parameter)
                    allocated[id(value)] = nn.Parameter(empty, value.requires_grad) if is_parameter else empty
                table[name] = allocated[id(value)]  # type: ignore[assignment]
    for weight in weights:
        weight.reset_sharded_param()
