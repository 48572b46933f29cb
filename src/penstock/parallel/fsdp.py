"""FSDP2 around a stage: its weights are sharded over the ranks that process different data.

Each rank has a shard of every weight, gathers whole weights for its first forward of a step, keeps them
until the stage's last backward, and then reduces the gradients of all microbatches at once. With
`dp_replicate` (HSDP) the shards' gradients are summed over the copies as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from transformers.pytorch_utils import Conv1D

from penstock.errors import ModelError
from penstock.options import ShardingOptions
from penstock.parallel.mesh import flattened, job_backend, present
from penstock.private import concatenate_meshes, tree_map_only
from penstock.runtime.sharded_weights import param_groups, sharded_modules
from penstock.runtime.stage_part import StagePart
from penstock.schedule.ops import Kind


@dataclass(frozen=True)
class Sharded(ShardingOptions):
    """How FSDP2 shards weights: `ShardingOptions`, with dtypes of torch."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of `fully_shard`."""
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

        precision = MixedPrecisionPolicy(self.param_dtype, self.reduce_dtype, cast_forward_inputs=False)
        return {
            "mp_policy": precision,
            "offload_policy": CPUOffloadPolicy() if self.cpu_offload else OffloadPolicy(),
            "reshard_after_forward": self.reshard_after_forward,
        }


def data_mesh(mesh: DeviceMesh) -> DeviceMesh | None:
    """dp_shard x cp, with dp_replicate in front; None without these axes. Collective."""
    shards = flattened(mesh, ("dp_shard", "cp"))
    if not present(mesh, ("dp_replicate",)):
        return shards
    if shards is None:
        return mesh["dp_replicate", "dp_shard"]
    return concatenate_meshes([mesh["dp_replicate"], shards])


class ExpertMeshes(NamedTuple):
    """The ranks of dp_shard x cp by their experts.

    ep: ranks with different experts
    copies: ranks with the same experts, with dp_replicate in front; None if that is one rank
    """

    ep: DeviceMesh
    copies: DeviceMesh | None


def expert_meshes(mesh: DeviceMesh, ep: int) -> ExpertMeshes:
    """The meshes of experts; neighbouring ranks have different ones. ep divides dp_shard x cp. Collective."""
    shards = flattened(mesh, ("dp_shard", "cp"))
    assert shards is not None
    backend: Any = dict.fromkeys(("ep_shard", "ep"), job_backend(mesh.device_type))
    grid = shards._unflatten(0, (shards.size() // ep, ep), ("ep_shard", "ep"), backend_override=backend)
    if present(mesh, ("dp_replicate",)):
        return ExpertMeshes(grid["ep"], concatenate_meshes([mesh["dp_replicate"], grid["ep_shard"]]))
    return ExpertMeshes(grid["ep"], grid["ep_shard"] if grid["ep_shard"].size() > 1 else None)


def shard_stage(
    module: nn.Module,
    layers: Sequence[nn.Module],
    mesh: DeviceMesh,
    sharded: Sharded,
    experts: Sequence[nn.Module] = (),
    copies: DeviceMesh | None = None,
    autocast: torch.dtype | None = None,
) -> StageShards:
    """Apply FSDP2 to a stage in place, layer by layer, then to the rest; it may be on the meta device.

    Args:
        experts: modules whose weights are distributed already; they are sharded over `copies`
        copies: the ranks with the same experts; None if that is one rank
        autocast: the dtype of torch.autocast in forwards; weights that autocast casts are gathered in it
    """
    from torch.distributed.fsdp import fully_shard

    if autocast is not None:
        sharded = replace(sharded, param_dtype=autocast, reduce_dtype=sharded.reduce_dtype or torch.float32)
    refuse_scalars(module)
    layers = _with_own_weights(module, layers)
    _refuse_shared(module, layers)
    distributed = {parameter for part in experts for parameter in part.parameters()}
    for part in experts if copies is not None else ():
        fully_shard(part, mesh=copies, shard_placement_fn=lambda _: Shard(1), **sharded.options)
    for layer in layers:
        if layer._forward_pre_hooks:
            layer.register_forward_pre_hook(_with_copies, prepend=True, with_kwargs=True)
    for part in (*(layer for layer in layers if layer is not module), module):
        fully_shard(part, mesh=mesh, ignored_params=distributed, **sharded.options)
    if autocast is not None:
        _gather_the_rest_as_it_is(module, sharded)
    return StageShards(module, sharded)


def is_cast(parameter: Tensor, owners: Sequence[nn.Module]) -> bool:
    """Whether autocast casts a parameter in each of its uses. owners: the modules that have it"""
    return parameter.dtype == torch.float32 and all(isinstance(owner, nn.Linear | Conv1D) for owner in owners)


def _gather_the_rest_as_it_is(module: nn.Module, sharded: Sharded) -> None:
    """Make FSDP2 gather weights that autocast casts in `param_dtype`, and other weights in their own dtype.

    FSDP2 has one policy for each group of weights, from which each weight takes its dtypes before it is first
    gathered. All gradients are summed in `reduce_dtype`.
    """
    own = replace(sharded, param_dtype=None).options["mp_policy"]
    for part in sharded_modules(module):
        for weight in (weight for group in param_groups(part) for weight in group.fsdp_params):
            info = weight._module_info
            if not is_cast(weight.sharded_param, (info.module, *info.shared_modules)):
                weight.init_dtype_attrs = partial(_with_policy, weight, own)


def _with_policy(weight: Any, policy: Any, of_group: Any) -> None:
    type(weight).init_dtype_attrs(weight, policy)


def refuse_scalars(module: nn.Module) -> None:
    """Raise ModelError for a parameter of no dimension."""
    for name, parameter in module.named_parameters():
        if parameter.ndim == 0:
            raise ModelError(
                f"{name}, a parameter of no dimension",
                "FSDP2 shards a weight along a dimension",
                "Make it one of shape (1,), or leave out dp_shard, dp_replicate and cp",
            )


def _with_copies(layer: nn.Module, args: Any, kwargs: Any) -> Any:
    """Copy the inputs of a layer: FSDP2 makes them views, which a hook may not modify."""
    return tree_map_only(Tensor, lambda x: x.clone() if x.requires_grad else x, (args, kwargs))


def _with_own_weights(module: nn.Module, layers: Sequence[nn.Module]) -> list[nn.Module]:
    """The layers that share no weight with the rest of the stage; other layers are sharded with the rest.

    For example, a prediction layer on the last stage shares the final norm's weight.
    """
    inside = {id(part) for layer in layers for part in layer.modules()}
    others = (part for part in module.modules() if id(part) not in inside)
    rest = {id(parameter) for part in others for parameter in part._parameters.values()}
    return [layer for layer in layers if layer is module or rest.isdisjoint(map(id, layer.parameters()))]


def _refuse_shared(module: nn.Module, layers: Sequence[nn.Module]) -> None:
    """Raise ModelError for a weight that two layers share."""
    prefixes = [f"{name}." for name, part in module.named_modules() if name and part in layers]
    first: dict[int, tuple[str, str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        prefix = next(filter(name.startswith, prefixes), "")
        other, other_name = first.setdefault(id(parameter), (prefix, name))
        if other != prefix:
            raise ModelError(
                f"{other_name} and {name}, which are one weight",
                "FSDP2 shards each layer by itself, with weights that no other layer has",
                "Give each layer a weight of its own, or leave out dp_shard, dp_replicate and cp",
            )


class StageShards(StagePart):
    """Reduces a stage's gradients with FSDP2 once a step, after the stage's last backward.

    Attributes:
        uneven: the mesh of ranks where some may lack gradients that others have; None where none does
    """

    reduces = True
    uneven: DeviceMesh | None = None

    def __init__(self, module: nn.Module, sharded: Sharded) -> None:
        from torch.distributed.fsdp import FSDPModule

        assert isinstance(module, FSDPModule)
        self._module, self._reshard = module, sharded.reshard_after_forward
        self._widens = sharded.reduce_dtype is not None
        self._parts: list[FSDPModule] = sharded_modules(module)
        for part in self._parts:
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
        self._defer_reduction()

    def after_forward(self) -> None:
        """Free the buffer of the last all-gather, as FSDP2 does where a forward returns through its root.

        The forward of a stage that is not the last one ends inside the root's.
        """
        context = self._module._get_fsdp_state()._comm_ctx
        if (last := context.all_gather_state) is not None:
            for stream in (context.all_gather_copy_in_stream, context.all_gather_stream):
                stream.wait_event(last.event)
            context.all_gather_state = None

    def after_backward(self, index: int, kind: Kind) -> None:
        """Add the gradients that W has computed in the weights' dtype to the sums in reduce_dtype.

        FSDP2 does so after a whole backward. Otherwise the next W would add in the narrower dtype.
        """
        if kind != "W" or not self._widens:
            return
        for group in self._groups():
            for parameter in group.fsdp_params:
                if hasattr(parameter, "_unsharded_param"):
                    parameter.accumulate_unsharded_grad_if_needed()
                    parameter.to_accumulated_grad_if_needed()

    def reduce(self) -> None:
        """Sum the gradients of all microbatches over the mesh into shards, and free the whole weights."""
        if self.uneven is not None:
            self._fill_missing(self.uneven)
        self._module.set_is_last_backward(True)
        self._module.set_reshard_after_backward(True)
        self._module.set_requires_gradient_sync(True)
        for group in self._groups():
            group.post_backward()
        for state in (part._get_fsdp_state() for part in self._parts):
            if state._is_root:
                state._root_post_backward_final_callback()
        self._defer_reduction()

    def _fill_missing(self, mesh: DeviceMesh) -> None:
        """Set zero gradients where another rank has a gradient and this one has none. Collective over `mesh`.

        A vision tower has none where a rank's rows have no image. FSDP2 reduces only the gradients of its own
        rank, so the ranks' collectives would differ.
        """
        weights = [w for group in self._groups() for w in group.fsdp_params if hasattr(w, "_unsharded_param")]
        local = [w.unsharded_accumulated_grad is not None or w._unsharded_param.grad is not None
                 for w in weights]  # fmt: skip
        present = torch.tensor(local, dtype=torch.int32, device=mesh.device_type)
        for group in mesh.get_all_groups():
            dist.all_reduce(present, dist.ReduceOp.MAX, group=group)
        for weight, here, somewhere in zip(weights, local, present.tolist(), strict=True):
            if somewhere and not here:
                weight._unsharded_param.grad = torch.zeros_like(weight._unsharded_param)

    def end_forwards(self) -> None:
        """Free the whole weights after a step without backwards."""
        from penstock.private import TrainingState

        for part in self._parts:
            for group in param_groups(part):
                # a stage's forward ends inside the root's, for whose end FSDP2 would wait
                group._training_state = TrainingState.IDLE
            part.reshard()

    def reset(self) -> None:
        self.end_forwards()

    def _groups(self) -> Iterator[Any]:
        for part in self._parts:
            yield from param_groups(part)

    def _defer_reduction(self) -> None:
        self._module.set_is_last_backward(False)
        self._module.set_reshard_after_backward(self._reshard)
        self._module.set_requires_gradient_sync(False)
