"""FSDP2 around a stage."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


def sharded_parts(module: nn.Module) -> list[Any]:
    """The modules in it that `fully_shard` was put around."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # who has not imported it does not use it
    return [] if fsdp is None else [part for part in module.modules() if isinstance(part, fsdp.FSDPModule)]


def groups_of(part: Any) -> list[Any]:
    """Of weights that are gathered together, in a module that `fully_shard` was put around; older torch has
    one at most.
    """
    state = part._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [group for group in (state._fsdp_param_group,) if group is not None]


def sharded_weights(module: nn.Module) -> list[Any]:
    """What FSDP2 knows of each weight that it spreads."""
    parts = sharded_parts(module)
    return [weight for part in parts for group in groups_of(part) for weight in group.fsdp_params]


class Sharding:
    """What FSDP2 does with the gradients of `module`, if it was applied to any part of it."""

    def __init__(self, module: nn.Module) -> None:
        self._parts = sharded_parts(module)
        self._states = [part._get_fsdp_state() for part in self._parts]
        self._groups = [group for part in self._parts for group in groups_of(part)]

    @property
    def reduces_in_backward(self) -> bool:
        """Whether it reduces gradients within each backward, and so before W has added its own.

        Such a stage takes whole backwards, until `set_requires_gradient_sync(False)` puts the reduction off.
        """
        return any(group.reduce_grads for group in self._groups)

    @property
    def any(self) -> bool:
        return bool(self._parts)

    @property
    def is_whole(self) -> bool:
        """Whether its weights are gathered and stay so: neither forwards nor backwards exchange any."""
        return all(
            group.is_unsharded
            and group.post_forward_mesh_info is None
            and not group.reshard_after_backward
            and not group.reduce_grads
            for group in self._groups
        )

    @property
    def is_plain(self) -> bool:
        """Whether its hooks do nothing to inputs, outputs and gradients but gather weights."""
        return all(
            not any((state._mp_policy.param_dtype, state._mp_policy.reduce_dtype,
                     state._mp_policy.output_dtype))
            for state in self._states
        )  # fmt: skip

    @contextmanager
    def unheeded(self) -> Iterator[None]:
        """A forward under this passes FSDP2's hooks by, which a whole and plain module can do without.

        They keep where one forward or backward stands in variables of the module. With a backward of the same
        module in another thread, each would take the other's for its own.
        """
        before = [(part, part._forward_pre_hooks, part._forward_hooks) for part in self._parts]
        for state, (part, pre, post) in zip(self._states, before, strict=True):
            part._forward_pre_hooks = _without(pre, state._pre_forward_hook_handle)
            part._forward_hooks = _without(post, state._post_forward_hook_handle)
        try:
            yield
        finally:
            for part, pre, post in before:
                part._forward_pre_hooks, part._forward_hooks = pre, post


def _without(hooks: OrderedDict[int, Any], handle: Any) -> OrderedDict[int, Any]:
    return OrderedDict((key, hook) for key, hook in hooks.items() if key != handle.id)


# ---- Tensors that are spread over ranks (DTensors), and what becomes of them where a whole one is needed.


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
