"""FSDP2 around a stage: its weights are sharded over the ranks that process other data.

Each rank holds a shard of every weight, gathers the whole ones for its first forward of a step, keeps them
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
    """dp_shard x cp, with dp_replicate in front, or None where there are neither. Collective."""
    shards = flattened(mesh, ("dp_shard", "cp"))
    if not present(mesh, ("dp_replicate",)):
        return shards
    if shards is None:
        return mesh["dp_replicate", "dp_shard"]
    return concatenate_meshes([mesh["dp_replicate"], shards])


class ExpertMeshes(NamedTuple):
    """The ranks of dp_shard x cp by their experts.

    ep: ranks that hold different experts
    copies: ranks that hold the same experts, with dp_replicate in front; None where there is one such rank
    """

    ep: DeviceMesh
    copies: DeviceMesh | None


def expert_meshes(mesh: DeviceMesh, ep: int) -> ExpertMeshes:
    """The meshes of experts; neighbouring ranks hold different ones. ep divides dp_shard x cp. Collective."""
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
        copies: the ranks that hold the same experts; None where there is one such rank
        autocast: the dtype of torch.autocast in forwards. Weights that it casts are gathered in it
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
    """Whether autocast casts a parameter in each of its uses. owners: the modules that hold it"""
    return parameter.dtype == torch.float32 and all(isinstance(owner, nn.Linear | Conv1D) for owner in owners)


def _gather_the_rest_as_it_is(module: nn.Module, sharded: Sharded) -> None:
    """Let FSDP2 gather in `param_dtype` what autocast casts, and in its own dtype what autocast leaves.

    FSDP2 has one policy for each group of weights, from which each weight takes its dtypes before it is first
    gathered. Gradients of all of them are summed in `reduce_dtype`.
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
    """FSDP2 gives a layer views, and a hook may not write into these."""
    return tree_map_only(Tensor, lambda x: x.clone() if x.requires_grad else x, (args, kwargs))


def _with_own_weights(module: nn.Module, layers: Sequence[nn.Module]) -> list[nn.Module]:
    """The layers that share no weight with the rest; the others are sharded with the rest.

    A prediction layer has the final norm's weight, and may stand on the last stage.
    """
    inside = {id(part) for layer in layers for part in layer.modules()}
    others = (part for part in module.modules() if id(part) not in inside)
    rest = {id(parameter) for part in others for parameter in part._parameters.values()}
    return [layer for layer in layers if layer is module or rest.isdisjoint(map(id, layer.parameters()))]


def _refuse_shared(module: nn.Module, layers: Sequence[nn.Module]) -> None:
    """Raise ModelError for a weight of two layers."""
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
        uneven: the mesh of ranks of which some may lack gradients that others have; None where all are alike
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
        """Free the buffer of the last gathering, as FSDP2 does where a forward returns through its root.

        A stage's forward ends half-way through the model's, but for the last stage's.
        """
        context = self._module._get_fsdp_state()._comm_ctx
        if (last := context.all_gather_state) is not None:
            for stream in (context.all_gather_copy_in_stream, context.all_gather_stream):
                stream.wait_event(last.event)
            context.all_gather_state = None

    def after_backward(self, number: int, kind: Kind) -> None:
        """Add the gradients that W has left in the weights' dtype to the sums in reduce_dtype.

        FSDP2 does so after a whole backward. Without it the next W would add in the narrower dtype.
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
        """Give zeros to weights without a gradient of which another rank has one. Collective over `mesh`.

        A tower has none where a rank's rows have no image; FSDP2 would reduce those that each rank has.
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
                # a stage's forward ends half-way through the whole model's, and FSDP2 would wait for the rest
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
