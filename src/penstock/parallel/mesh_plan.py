"""What the axes beside the pipeline make of a stage, and of a microbatch, in the order in which they do.

1. ep deals out experts, cp enters the attention functions, tp shares out single matrices (`share_out`, before
   anything of the user's is put around the stage)
2. FSDP2 spreads what is left over dp_shard x cp (`spread`, last)
3. each microbatch is cut along its sequence over cp (`cut`)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from penstock.batch.padding import Padding
from penstock.batch.shapes import Microbatch
from penstock.errors import ConfigError
from penstock.parallel.context import check as context_check
from penstock.parallel.context import sequence as context
from penstock.parallel.context.attention import Context, How, enter
from penstock.parallel.expert import experts as expert
from penstock.parallel.expert.dispatch import Directions
from penstock.parallel.fsdp import Sharded, StageShards, data_mesh, expert_meshes, refuse_scalars, shard
from penstock.parallel.mesh import Axes
from penstock.parallel.tensor.shard import check, complete_gradients, tensor_parallel
from penstock.parallel.tensor.styles import check_length
from penstock.runtime.stage import Shards


@dataclass(frozen=True)
class ParallelOptions:
    """How the axes do what they do.

    sharded: how FSDP2 spreads weights; context: how attention goes over a sequence that is cut, "ulysses" or
        "ring"; sequence_parallel: whether tp shares out what lies between matrices along the sequence
    """

    sharded: Sharded = field(default_factory=Sharded)
    context: How = "ulysses"
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        if self.context not in ("ulysses", "ring"):
            rule = "attention over a sequence that is cut goes by 'ulysses' or 'ring'"
            raise ConfigError(f"context={self.context!r}", rule, "Take 'ulysses' where heads divide by cp")


def check_model(model: PreTrainedModel, axes: Axes, ways: ParallelOptions) -> None:
    """Refuse what the axes would get wrong, of the whole model, with or without values.

    Raises ConfigError, ModelError. An axis of -1 is looked at once its size is known.
    """
    if (axes.dp_replicate, axes.dp_shard, axes.cp) != (1, 1, 1):
        refuse_scalars(model)
    if axes.tp > 1:
        check(model, axes.tp, sequence_parallel=ways.sequence_parallel)
    if axes.cp > 1:
        context_check.check(model, axes.cp, ways.context, max(axes.tp, 1))
    if axes.ep > 1:
        expert.check(model, axes.ep, axes.shards // axes.ep if axes.known else 1)


class MeshPlan:
    """The mesh around one rank of a pipeline."""

    def __init__(
        self,
        mesh: DeviceMesh,
        axes: Axes,
        ways: ParallelOptions,
        directions: Callable[[DeviceMesh], Directions] = Directions.of,
    ) -> None:
        """axes: without -1; directions: of the mesh of those with different experts, what tokens travel over

        Collective.
        """
        self._mesh, self._axes, self._ways = mesh, axes, ways
        self._data = data_mesh(mesh)
        self._experts = expert_meshes(mesh, axes.ep) if axes.ep > 1 else None
        self._directions = None if self._experts is None else directions(self._experts.own)
        if self._axes.cp > 1:
            self._context = Context(mesh.get_group("cp"), ways.context)
        self._parts: list[tuple[Microbatch, dict[str, Any]]] = []

    @property
    def axes(self) -> Axes:
        """Without -1."""
        return self._axes

    @property
    def groups(self) -> set[dist.ProcessGroup]:
        """All process groups of the mesh and of what was made of it, that this rank is in."""
        meshes = filter(None, (self._mesh, self._data, *(self._experts or ())))
        return {group for mesh in meshes for group in mesh.get_all_groups()}

    @property
    def computed(self) -> torch.dtype | None:
        """The dtype that weights are gathered and computed in; None for their own."""
        return None if self._data is None else self._ways.sharded.param_dtype

    def share_out(self, part: nn.Module) -> None:
        """In place, of a stage on the meta device, or with values on its own. Collective."""
        if self._experts is not None:
            expert.expert_parallel(part, self._experts.own, self._directions)
        if self._axes.cp > 1:  # before tp, whose forward stands around the one that cp may change
            assert isinstance(part, PreTrainedModel)
            enter(part, self._context)
        if self._axes.tp > 1:
            tensor_parallel(part, self._mesh["tp"], sequence_parallel=self._ways.sequence_parallel)

    def spread(self, module: nn.Module, layers: Sequence[nn.Module]) -> Shards | None:
        """Around the stage's module, in place; None where nothing is left to do after its backwards."""
        if self._data is not None:
            experts = [] if self._experts is None else list(expert.mixtures(module).values())
            spare = None if self._experts is None else self._experts.copies
            return shard(module, layers, self._data, self._ways.sharded, experts, spare)
        return _Complete(module) if self._axes.tp > 1 else None

    def prepare(self, microbatches: Sequence[Microbatch]) -> None:
        """Cut the microbatches of a step, for `cut` and `joined`. Raises BatchError."""
        if self._axes.cp > 1:
            index, count = self._mesh.get_local_rank("cp"), self._axes.cp
            self._parts = [(whole, context.cut(whole, index, count)) for whole in microbatches]
        if self._axes.tp > 1 and self._ways.sequence_parallel:
            for microbatch in microbatches:  # in the forward one part of the batch alone may be refused
                check_length(Padding().longest([self.cut(microbatch)]), self._axes.tp)

    def cut(self, microbatch: Microbatch) -> Microbatch:
        """This rank's part of one of those that were prepared."""
        if self._axes.cp == 1:
            return microbatch
        return next(part for whole, part in self._parts if whole is microbatch)

    def joined(self, output: Any, number: int) -> Any:
        """Of what the last stage made of this rank's part of prepared microbatch `number`: tensors with an
        entry for each token are put together over cp, in the sequence's order; of the routers' loss each rank
        has its part. Collective over cp.
        """
        if self._axes.cp == 1:
            return output
        cut: context.Whole = self._parts[number][1][context.WHOLE]
        if isinstance(output, Mapping) and "auxiliary_loss" in output:
            auxiliary = output["auxiliary_loss"].clone()
            dist.all_reduce(auxiliary, group=self._mesh.get_group("cp"))
            output = {**output, "auxiliary_loss": auxiliary}

        def whole(part: Tensor) -> Tensor:
            is_cut = part.dim() > 1 and part.shape[1] == 2 * cut.piece
            return self.whole(part, cut.length) if is_cut else part

        return tree_map_only(Tensor, whole, output)

    def whole(self, part: Tensor, length: int) -> Tensor:
        """What the ranks of cp hold, (rows, tokens, ...) each, as (rows, length, ...). Collective over cp."""
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(self._axes.cp)]
        dist.all_gather(parts, part.contiguous(), group=self._mesh.get_group("cp"))
        return context.joined(parts, 1)[:, :length]


class _Complete:
    """Of a stage whose weights tp alone shares out: some gradients are sums that are yet to be made."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def accumulate(self) -> None:
        """Gradients are in the weights' own dtype."""

    @torch.no_grad()
    def reduce(self) -> None:
        complete_gradients(self._module)

    def reshard(self) -> None:
        """Nothing was gathered."""


__all__ = ["MeshPlan", "ParallelOptions", "StageShards", "check_model"]
