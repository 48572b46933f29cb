"""How the axes other than `pp` change a stage and a microbatch, in this order:

1. ep distributes experts, cp replaces the attention functions, tp shards single matrices (`parallelize`,
   before a user's functions change the stage)
2. FSDP2 shards the remaining weights over dp_shard x cp (`fully_shard`, last)
3. cp splits each microbatch along its sequence (`split_sequences`)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from penstock.batch.microbatches import PIXELS
from penstock.batch.padding import Padding
from penstock.batch.shapes import Microbatch
from penstock.errors import BatchError, ConfigError, ModelError
from penstock.parallel.axes import Axes
from penstock.parallel.context import check as context_check
from penstock.parallel.context import sequence
from penstock.parallel.context.attention import Method, parallelize_attention
from penstock.parallel.expert import experts as expert
from penstock.parallel.fsdp import Sharded, data_mesh, expert_meshes, refuse_scalars, shard_stage
from penstock.parallel.tensor.plan import assigned, check
from penstock.parallel.tensor.shard import complete_gradients, tensor_parallel
from penstock.parallel.tensor.styles import STYLES, Style, check_length
from penstock.private import tree_map_only
from penstock.runtime.stage_part import StagePart
from penstock.runtime.transport.groups import limit_waits


@dataclass(frozen=True)
class ParallelOptions:
    """Options of the axes.

    sharded: how FSDP2 shards weights
    context: the attention over a split sequence, "ulysses" or "ring"
    sequence_parallel: whether tp also shards the activations between its matrices, along the sequence
    autocast: the dtype of torch.autocast in forwards; None for none
    shards_logits: whether tp keeps the logits sharded, for a loss of penstock that takes them so

    Raises ConfigError for another `context`.
    """

    sharded: Sharded = field(default_factory=Sharded)
    context: Method = "ulysses"
    sequence_parallel: bool = False
    autocast: torch.dtype | None = None
    shards_logits: bool = True

    def __post_init__(self) -> None:
        if self.context not in ("ulysses", "ring"):
            rule = "attention over a split sequence is 'ulysses' or 'ring'"
            raise ConfigError(f"context={self.context!r}", rule, "Take 'ulysses' where heads divide by cp")

    def of_tp(self) -> dict[str, bool]:
        """The options of `tensor_parallel`."""
        return {"sequence_parallel": self.sequence_parallel, "shards_logits": self.shards_logits}


def check_model(model: PreTrainedModel, axes: Axes, options: ParallelOptions) -> None:
    """Refuse a whole model, with or without values, if the axes would train it wrongly.

    An axis of -1 is checked once its size is known. Raises ConfigError, ModelError.
    """
    if (axes.dp_replicate, axes.dp_shard, axes.cp) != (1, 1, 1):
        refuse_scalars(model)
    if axes.ranks_per_stage != 1:
        _refuse_gradient_hooks(model, axes)
    if axes.tp > 1:
        check(model, axes.tp, sequence_parallel=options.sequence_parallel)
    if axes.cp > 1:
        context_check.check(model, axes.cp, options.context, max(axes.tp, 1))
    if axes.ep > 1:
        expert.check(model, axes.ep, axes.shards // axes.ep if axes.resolved else 1)


def _refuse_gradient_hooks(model: PreTrainedModel, axes: Axes) -> None:
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks:
            raise ModelError(
                f"{name}, with a gradient hook, on {axes}",
                "the other axes replace weights by shards, and no hook sees the whole gradient",
                "Change the gradients after pipe.step(), over pipe.named_parameters()",
            )


class Local(NamedTuple):
    """Numbers of entries of a parameter on one rank of a mesh; for uneven shards, on the rank with most.

    own: in the rank's shard
    whole: in the tensor that FSDP2 gathers from shards; 0 where FSDP2 does not shard the parameter
    padded: in that tensor with the padding of uneven shards
    """

    own: int
    whole: int
    padded: int


def local_sizes(model: nn.Module, axes: Axes) -> dict[str, Local]:
    """The local size of each parameter under `MeshPlan`, by name; of a whole model or a stage.

    axes: without -1
    """
    styles = assigned(model, axes.tp) if axes.tp > 1 else {}
    inside = tuple(f"{name}." for name in expert.mixtures(model)) if axes.ep > 1 else ()
    sharded = max(axes.dp_replicate, axes.dp_shard, axes.cp) > 1
    copies = axes.shards // axes.ep
    sizes = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        shape, dimension, shards = list(parameter.shape), 0, axes.shards if sharded else 0
        if inside and name.startswith(inside):
            shape[0] //= axes.ep
            dimension, shards = 1, copies if copies * axes.dp_replicate > 1 else 0
        else:
            style = STYLES.get(styles.get(name, styles.get(name.rpartition(".")[0], "")), Style())
            if style.dimension is not None and style.dimension < len(shape):
                shape[style.dimension] //= axes.tp
        whole = math.prod(shape)
        if shards:
            shape[dimension] = -(-shape[dimension] // shards)
        own = math.prod(shape)
        sizes[name] = Local(own, whole if shards else 0, own * shards)
    return sizes


class MeshPlan:
    """The mesh around one rank of a pipeline. The constructor is collective.

    Args:
        axes: resolved
        timeout: seconds that a collective over the mesh waits for another rank
    """

    def __init__(self, mesh: DeviceMesh, axes: Axes, options: ParallelOptions, timeout: float) -> None:
        self.axes = axes
        self._mesh, self._options = mesh, options
        self._data = data_mesh(mesh)
        self._experts = expert_meshes(mesh, axes.ep) if axes.ep > 1 else None
        self._split: list[tuple[Microbatch, dict[str, Any]]] = []  # whole microbatches, this rank's parts
        meshes = filter(None, (mesh, self._data, *(self._experts or ())))
        groups = {group for axes_mesh in meshes for group in axes_mesh.get_all_groups()}
        limit_waits(groups, timeout)

    @property
    def param_dtype(self) -> torch.dtype | None:
        """The dtype that weights are gathered and computed in; None for their own."""
        return None if self._data is None else self._options.sharded.param_dtype

    def parallelize(self, module: nn.Module) -> None:
        """Apply ep, cp and tp to a stage in place, on the meta device or with values. Collective."""
        if self._experts is not None:
            expert.expert_parallel(module, self._experts.ep)
        if self.axes.cp > 1:  # before tp, which wraps the forward that cp may replace
            assert isinstance(module, PreTrainedModel)
            parallelize_attention(module, self._mesh.get_group("cp"), self._options.context)
        if self.axes.tp > 1:
            tensor_parallel(module, self._mesh["tp"], **self._options.of_tp())

    def fully_shard(self, module: nn.Module, layers: Sequence[nn.Module]) -> StagePart | None:
        """Apply FSDP2 to a stage's module in place. Returns None if gradients need no later reduction."""
        if self._data is not None:
            experts = [] if self._experts is None else list(expert.mixtures(module).values())
            copies = None if self._experts is None else self._experts.copies
            options = self._options
            shards = shard_stage(
                module, layers, self._data, options.sharded, experts, copies, options.autocast
            )
            seeing = isinstance(module, PreTrainedModel) and hasattr(module.base_model, "get_image_features")
            shards.uneven = self._data if seeing else None
            return shards
        return _TensorShards(module) if self.axes.tp > 1 else None

    def split_sequences(self, microbatches: Sequence[Microbatch]) -> None:
        """Split the microbatches of a step, for `local` and `gather_output`. Raises BatchError."""
        if max(self.axes.cp, self.axes.tp) > 1:
            _refuse_images(microbatches, self.axes)
        if self.axes.cp > 1:
            index, count = self._mesh.get_local_rank("cp"), self.axes.cp
            self._split = [(whole, sequence.split(whole, index, count)) for whole in microbatches]
        if self.axes.tp > 1 and self._options.sequence_parallel:
            for microbatch in microbatches:  # now: in the forward, one part of the batch alone may be refused
                check_length(Padding().longest([self.local(microbatch)]), self.axes.tp)

    def local(self, microbatch: Microbatch) -> Microbatch:
        """This rank's part of a microbatch that `split_sequences` has split."""
        if self.axes.cp == 1:
            return microbatch
        return next(local for whole, local in self._split if whole is microbatch)

    def gather_output(self, output: Any, number: int) -> Any:
        """The last stage's output for the whole microbatch `number`. Collective over cp.

        Tensors with an entry per token are concatenated in the sequence's order; the ranks' shares of the
        routers' loss are summed.
        """
        if self.axes.cp == 1:
            return output
        full: sequence.FullSequence = self._split[number][1][sequence.FULL_SEQUENCE]
        group = self._mesh.get_group("cp")
        if isinstance(output, Mapping) and "auxiliary_loss" in output:
            auxiliary = output["auxiliary_loss"].clone()
            dist.all_reduce(auxiliary, group=group)
            output = {**output, "auxiliary_loss": auxiliary}

        def gather(local: Tensor) -> Tensor:
            is_split = local.dim() > 1 and local.shape[1] == 2 * full.piece
            return self.gather_sequence(local, full.length) if is_split else local

        return tree_map_only(Tensor, gather, output)

    def gather_sequence(self, local: Tensor, length: int) -> Tensor:
        """(rows, local tokens, ...) of each rank of cp as (rows, length, ...). Collective over cp."""
        parts = [torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(self.axes.cp)]
        dist.all_gather(parts, local.contiguous(), group=self._mesh.get_group("cp"))
        return sequence.concatenate(parts, 1)[:, :length]


def _refuse_images(microbatches: Sequence[Microbatch], axes: Axes) -> None:
    for name in (name for names in PIXELS.values() for name in names):
        if any(name in microbatch for microbatch in microbatches):
            raise BatchError(
                f"{name} in a batch with {axes}",
                "cp and tp split rows and matrices, but a model's towers take whole images",
                "Leave cp and tp at 1; dp_shard and dp_replicate take images",
            )


class _TensorShards(StagePart):
    """A stage whose weights only tp shards: some gradients are still partial sums after its backwards."""

    reduces = True

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    @torch.no_grad()
    def reduce(self) -> None:
        complete_gradients(self._module)
