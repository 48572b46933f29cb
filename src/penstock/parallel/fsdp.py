"""FSDP2 around a stage: its weights spread over the ranks that work on other data.

Each rank holds a shard of every weight, gathers the whole ones for its first forward of a step, keeps them
until the stage's last backward, and then reduces the gradients of all microbatches at once. With
`dp_replicate` (HSDP) the shards' gradients are summed over the copies as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from penstock.errors import ModelError
from penstock.parallel.mesh import own_backend
from penstock.parallel.reductions import flat, present
from penstock.runtime.sharded_weights import groups_of, sharded_parts


@dataclass(frozen=True)
class Sharded:
    """How weights are spread, as FSDP2 has it.

    param_dtype: what weights are gathered and computed in; reduce_dtype: what gradients are summed in; None
        leaves either as the weights are
    reshard_after_forward: let go of the gathered weights after each forward, and gather them again for its
        backward: less memory, a gathering for each microbatch
    cpu_offload: keep shards, their gradients and the optimizer's state in host memory
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    reshard_after_forward: bool = False
    cpu_offload: bool = False

    @property
    def options(self) -> dict[str, Any]:
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

        precision = MixedPrecisionPolicy(self.param_dtype, self.reduce_dtype, cast_forward_inputs=False)
        return {
            "mp_policy": precision,
            "offload_policy": CPUOffloadPolicy() if self.cpu_offload else OffloadPolicy(),
            "reshard_after_forward": self.reshard_after_forward,
        }


def data_mesh(mesh: DeviceMesh) -> DeviceMesh | None:
    """Over which weights are spread: dp_shard x cp, with the copies of dp_replicate in front; None where
    there are neither. Collective.
    """
    shards = flat(mesh, ("dp_shard", "cp"))
    if not present(mesh, ("dp_replicate",)):
        return shards
    if shards is None:
        return mesh["dp_replicate", "dp_shard"]
    return DeviceMesh._concatenate([mesh["dp_replicate"], shards])


class ExpertMeshes(NamedTuple):
    """The ranks of dp_shard x cp by their experts.

    own: those that hold different experts (`ep`); copies: those that hold the same, with the copies of
        dp_replicate in front; None where there are no such
    """

    own: DeviceMesh
    copies: DeviceMesh | None


def expert_meshes(mesh: DeviceMesh, ep: int) -> ExpertMeshes:
    """ep: divides dp_shard x cp. Neighbours hold different experts. Collective."""
    shards = flat(mesh, ("dp_shard", "cp"))
    assert shards is not None
    backend = own_backend(mesh.device_type)
    both = shards._unflatten(
        0,
        (shards.size() // ep, ep),
        ("ep_shard", "ep"),
        backend_override={"ep_shard": backend, "ep": backend},
    )
    replicated = present(mesh, ("dp_replicate",))
    if both["ep_shard"].size() == 1 and not replicated:
        return ExpertMeshes(both["ep"], None)
    copies = both["ep_shard"]
    return ExpertMeshes(
        both["ep"], DeviceMesh._concatenate([mesh["dp_replicate"], copies]) if replicated else copies
    )


def shard(
    module: nn.Module,
    layers: Sequence[nn.Module],
    mesh: DeviceMesh,
    how: Sharded,
    experts: Sequence[nn.Module] = (),
    copies: DeviceMesh | None = None,
) -> StageShards:
    """Spread a stage's weights in place, layer by layer, the rest together; they may be on the meta device.

    experts: modules whose weights are dealt out already, one part of them to each rank; they are spread over
        `copies`, the ranks that hold the same part, where there are such
    """
    from torch.distributed.fsdp import fully_shard

    refuse_scalars(module)
    dealt = {parameter for part in experts for parameter in part.parameters()}
    for part in experts if copies is not None else ():
        fully_shard(part, mesh=copies, shard_placement_fn=lambda _: Shard(1), **how.options)
    for layer in layers:
        if layer is module:  # of one's own, which is a single layer
            continue
        fully_shard(layer, mesh=mesh, ignored_params=dealt, **how.options)
    fully_shard(module, mesh=mesh, ignored_params=dealt, **how.options)
    return StageShards(module, how)


def refuse_scalars(module: nn.Module) -> None:
    """Raises ModelError."""
    for name, parameter in module.named_parameters():
        if parameter.ndim == 0:
            raise ModelError(
                f"{name}, a parameter of no dimension",
                "FSDP2 spreads a weight along a dimension",
                "Make it one of shape (1,), or leave out dp_shard, dp_replicate and cp",
            )


class StageShards:
    """What FSDP2 does with a stage's gradients, and when: once a step, after the stage's last backward."""

    def __init__(self, module: nn.Module, how: Sharded) -> None:
        from torch.distributed.fsdp import FSDPModule

        assert isinstance(module, FSDPModule)
        self._module, self._reshard = module, how.reshard_after_forward
        self._widens = how.reduce_dtype is not None
        self._parts: list[FSDPModule] = sharded_parts(module)
        for part in self._parts:
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
        self._put_off()

    def accumulate(self) -> None:
        """Add what W has left in the weights' own dtype to the sums in reduce_dtype, as FSDP2 does after a
        whole backward. Without this the next W would add to it in the narrow one.
        """
        if not self._widens:
            return
        for part in self._parts:
            for group in groups_of(part):
                for parameter in group.fsdp_params:
                    if hasattr(parameter, "_unsharded_param"):
                        parameter.accumulate_unsharded_grad_if_needed()
                        parameter.to_accumulated_grad_if_needed()

    def reduce(self) -> None:
        """Sum the gradients of all microbatches over the mesh, each rank its shards; the whole weights go."""
        self._module.set_is_last_backward(True)
        self._module.set_reshard_after_backward(True)
        self._module.set_requires_gradient_sync(True)
        for part in self._parts:
            for group in groups_of(part):
                group.post_backward()
        for state in (part._get_fsdp_state() for part in self._parts):
            if state._is_root:
                state._root_post_backward_final_callback()
        self._put_off()

    def reshard(self) -> None:
        """Let go of the whole weights, after a step without backwards, or one that failed."""
        from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

        for part in self._parts:
            for group in groups_of(part):
                # a stage's forward ends half-way through the whole model's, and FSDP2 would wait for the rest
                group._training_state = TrainingState.IDLE
            part.reshard()

    def _put_off(self) -> None:
        self._module.set_is_last_backward(False)
        self._module.set_reshard_after_backward(self._reshard)
        self._module.set_requires_gradient_sync(False)
