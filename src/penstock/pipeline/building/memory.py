"""Estimates of each rank's memory, for memory limits, balanced layouts and dry runs.

They are made before a weight is read. Weights, gradients and optimizer state follow from shapes and the mesh,
and are exact. Activations come from a forward and the first half of a backward without values. Activations of
vision towers are left out, because they depend on the images of a microbatch.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from penstock.batch.liger import Chunked
from penstock.errors import ConfigError, ModelError
from penstock.models import activation_offloading
from penstock.models.activation_checkpointing import Checkpointing, install
from penstock.models.activation_offloading import Offloading
from penstock.models.huggingface.boundary import compute_in
from penstock.models.huggingface.entries import taken
from penstock.models.huggingface.head import defer_head
from penstock.models.huggingface.stages import HFEdges, cut
from penstock.models.split.activation_sizes import AroundOp, StageSizes, stage_sizes
from penstock.models.split.balanced_split import Memory
from penstock.models.split.model_costs import model_costs
from penstock.models.stage import StageInfo
from penstock.models.tracing.autocast import AutocastWithoutValues, cast_again
from penstock.models.tracing.probe import layer_kind
from penstock.parallel.axes import Axes
from penstock.parallel.fsdp import is_cast
from penstock.parallel.mesh import imagined
from penstock.parallel.mesh_plan import Local, ParallelOptions, local_sizes
from penstock.parallel.tensor.shard import tensor_parallel
from penstock.pipeline.building.build_plan import BuildPlan, StagePlan
from penstock.runtime.device.memory import MicrobatchBytes
from penstock.runtime.device.offload import Offload
from penstock.schedule import Costs, simulate
from penstock.schedule.simulation.recompute import StageMicrobatches, counts_within, first_in_flight, mixed

# (name, parameter, number of its entries on this rank) -> bytes of optimizer state for it
Kept = Callable[[str, Tensor, int], float]


def adamw(name: str, parameter: Tensor, entries: int) -> float:
    """AdamW keeps two tensors for every parameter."""
    return 2 * parameter.itemsize * entries


class RankMemory(NamedTuple):
    """Bytes of one process of a rank; for uneven shards, of the process with most.

    Attributes:
        weights: its shards, in their own dtype
        gradients: of its shards, for the optimizer; with gradients that a step sets aside
        optimizer: the optimizer's state
        gathered_weights: whole weights that FSDP2 gathers during a step, with the buffers of an all-gather
        gathered_gradients: the sums over a step's microbatches, before they are sharded
        host: the part of weights, gradients and optimizer in host memory (cpu_offload)
        activations: of live microbatches, with messages, at their peak; None where only a step shows them
        casts: copies of weights in the dtype of autocast, kept throughout a step
    """

    weights: int
    gradients: int
    optimizer: int
    gathered_weights: int = 0
    gathered_gradients: int = 0
    host: int = 0
    activations: int | None = None
    casts: int = 0

    @property
    def fixed(self) -> int:
        """Bytes on the device that do not depend on the batch."""
        return sum(self[:5]) - self.host + self.casts

    @property
    def total(self) -> int:
        """Bytes on the device; without activations where they are unknown."""
        return self.fixed + (self.activations or 0)


@dataclass(frozen=True)
class Account:
    """An estimate of the memory of a pipeline that is not built yet.

    axes: the mesh's axes other than `pp`, without -1
    checkpointing: of its activations; None keeps them all
    offloading: which activations are in host memory between forward and backward
    chunked_loss: as in Options; has an effect where the mesh has no axis but tp
    accumulates: whether a step adds to the gradients of earlier steps; gradients of weights that several
        stages share are then set aside during the step
    sequence_length, image_tokens: as in AutoOptions, for the durations of ops; without a sequence_length
        each row is one document
    """

    plan: BuildPlan
    axes: Axes = field(default_factory=Axes)
    options: ParallelOptions = field(default_factory=ParallelOptions)
    checkpointing: Checkpointing | None = None
    chunked_loss: Chunked = True
    offloading: Offloading | None = None
    accumulates: bool = False
    sequence_length: int | None = None
    image_tokens: int | None = None

    def ranks(self, shape: tuple[int, int] | None = None, kept: Kept = adamw) -> list[RankMemory]:
        """The memory of each rank of the pipeline.

        shape: (rows, sequence) of a microbatch before cp and tp shard it; None leaves activations out
        kept: bytes that the optimizer keeps for a parameter
        """
        schedule = self.plan.schedule
        costs = None if shape is None else self.costs(shape)
        peaks = [None] * schedule.ranks if costs is None else map(int, simulate(schedule, costs).peak_memory)
        fixed = (self._fixed(rank, kept) for rank in range(schedule.ranks))
        return [usage._replace(activations=peak) for usage, peak in zip(fixed, peaks, strict=True)]

    def _fixed(self, rank: int, kept: Kept) -> RankMemory:
        """The memory of a rank without activations."""
        stages = [stage for stage in self.plan.stages if stage.rank == rank]
        usages = [self._weights(stage.parameter_names, kept) for stage in stages]
        columns = zip(*(usage[:6] for usage, _ in usages), strict=True)
        summed = RankMemory(*(sum(column) for column in columns))
        summed = summed._replace(casts=sum(usage.casts for usage, _ in usages))
        if self.accumulates and not self.options.sharded.cpu_offload:
            aside = (
                self._weights(stage.parameter_names & self._shared, kept)[0].gradients for stage in stages
            )
            summed = summed._replace(gradients=summed.gradients + sum(aside))
        layers = [self._gathered(stage, whole) for stage, (_, whole) in zip(stages, usages, strict=True)]
        throughout, working = zip(*layers, strict=True)
        return summed._replace(gathered_weights=sum(throughout) + max(working))

    def _weights(self, names: Collection[str], kept: Kept) -> tuple[RankMemory, dict[str, int]]:
        """The memory of one stage's parameters, and the bytes of whole weights that FSDP2 gathers, by layer.

        A weight with two names counts once.
        """
        model, sharded, autocast = self.plan.source.model, self.options.sharded, self.options.autocast
        distinct = {id(model.get_parameter(name)): name for name in sorted(names, reverse=True)}
        weights = gradients = optimizer = summed = host = casts = 0
        owners: dict[int, list[nn.Module]] = defaultdict(list)
        for name in names:
            owners[id(model.get_parameter(name))].append(model.get_submodule(name.rpartition(".")[0]))
        gathered: dict[str, int] = defaultdict(int)
        for name in distinct.values():
            parameter, local = model.get_parameter(name), self._local[name]
            computed, reduced = sharded.param_dtype or parameter.dtype, sharded.reduce_dtype
            if autocast is not None:
                reduced = reduced or torch.float32
                if local.whole and is_cast(parameter, owners[id(parameter)]):
                    computed = autocast
                elif any(is_cast(parameter, [owner]) for owner in owners[id(parameter)]):
                    casts += (local.whole or local.own) * autocast.itemsize
            own = local.own * parameter.itemsize
            states = math.ceil(kept(name, parameter, local.own)) if parameter.requires_grad else 0
            weights += own
            gathered[self._layer(name)] += local.padded * computed.itemsize
            if parameter.requires_grad:
                gradients += own
                optimizer += states
                summed += local.whole * (reduced or computed).itemsize
            if sharded.cpu_offload and local.whole:
                host += own + states + own * parameter.requires_grad
        return RankMemory(weights, gradients, optimizer, 0, summed, host, None, casts), gathered

    @cached_property
    def _shared(self) -> frozenset[str]:
        """The names of weights that several stages share."""
        parameter = self.plan.source.model.get_parameter
        names = [stage.parameter_names for stage in self.plan.stages]
        holders = Counter(key for held in names for key in {id(parameter(name)) for name in held})
        return frozenset(name for name in frozenset().union(*names) if holders[id(parameter(name))] > 1)

    @cached_property
    def _local(self) -> dict[str, Local]:
        return local_sizes(self.plan.source.model, self.axes)

    def _layer(self, name: str) -> str:
        """The index of the layer of a parameter, as text; empty outside of layers."""
        prefix = f"{self.plan.chain.layers}."
        return name.removeprefix(prefix).partition(".")[0] if name.startswith(prefix) else ""

    def _gathered(self, stage: StagePlan, layers: dict[str, int]) -> tuple[int, int]:
        """Bytes of whole weights that a stage keeps throughout a step, and further bytes during its ops."""
        if not self.options.sharded.reshard_after_forward:
            return sum(layers.values()), 0
        rest = layers.get("", 0)
        largest = max((size for layer, size in layers.items() if layer), default=0)
        # a backward prefetches the layer that ran before it, which may be the last one of another microbatch
        ahead = largest if self._most_live[stage.stage] > 1 else 0
        return rest + ahead, max(rest, largest) + largest  # a layer, and the buffer of the previous one

    @cached_property
    def _most_live(self) -> list[int]:
        """By stage, the most microbatches at once between F and the end of the backward."""
        schedule = self.plan.schedule
        live, most = [0] * schedule.stages, [0] * schedule.stages
        for op in (op for program in schedule.programs for op in program):
            live[op.stage] += {"F": 1, "B": -1, "I": 0, "W": -1}[op.kind]
            most[op.stage] = max(most[op.stage], live[op.stage])
        return most

    # ---- activations

    def costs(self, shape: tuple[int, int]) -> Costs | None:
        """Bytes that microbatches of `shape` (rows, sequence) will hold, for `simulate`.

        Durations are multiply-adds of F, I and W, what runs again included. None if the forward depends on
        values, so that only a step can measure them (Pipeline.costs).
        """
        if self.checkpointing is None:
            return self._sizes(shape)
        sizes = self._kept_and_recomputed(shape)
        return None if sizes is None else mixed(self.plan.schedule, *sizes, self.recomputed())

    def recomputed(self) -> StageMicrobatches:
        """The (stage, microbatch) pairs whose layers run again in the backward.

        Raises ConfigError where recomputing all of them still exceeds the memory limit.
        """
        checkpointing, schedule = self.checkpointing, self.plan.schedule
        if checkpointing is None:
            return frozenset()
        if checkpointing.memory_limit is None:
            return first_in_flight(schedule, checkpointing.in_flight)
        assert checkpointing.shape is not None
        sizes = self._kept_and_recomputed(checkpointing.shape)
        if sizes is None:
            raise ConfigError(
                f"memory_limit for {type(self.plan.source.model).__name__}",
                "its forward depends on values, so its activations are unknown before a step",
                "Give in_flight, from Pipeline.memory after a step",
            )
        fixed = [rank.fixed for rank in self.ranks()]
        everything = first_in_flight(schedule, None)
        least = simulate(schedule, mixed(schedule, *sizes, everything)).peak_memory
        needed = [peak + weight for peak, weight in zip(least, fixed, strict=True)]
        if max(needed) > checkpointing.memory_limit:
            rank = needed.index(max(needed))
            raise ConfigError(
                f"memory_limit={_mib(checkpointing.memory_limit)}",
                f"rank {rank} takes {_mib(fixed[rank])} for weights, gradients and AdamW's moments, and "
                f"{_mib(least[rank])} more with every forward run again",
                f"Give {_mib(needed[rank])} or more, or take more ranks, a larger dp_shard or smaller "
                "microbatches",
            )
        limits = [checkpointing.memory_limit - weight for weight in fixed]
        return first_in_flight(schedule, counts_within(schedule, *sizes, limits))

    def _kept_and_recomputed(self, shape: tuple[int, int]) -> tuple[Costs, Costs] | None:
        """Sizes with all activations kept, and with all recomputed, one layer at a time."""
        kept, recomputed = self._sizes(shape), self._sizes(shape, self.checkpointing)
        if kept is None or recomputed is None:
            return None
        # The bisection of counts assumes that recomputing more never takes more memory
        placement, one = self.plan.schedule.placement, min(1, self.plan.schedule.microbatches)
        least: dict[str, Any] = {}
        for name in ("held_in_forward", "held_in_backward"):
            both = (costs.rows(name, placement, one) for costs in (recomputed, kept))
            least[name] = [nbytes for (nbytes,) in (min(pair) for pair in zip(*both, strict=True))]
        return kept, replace(recomputed, **least)

    def _sizes(self, shape: tuple[int, int], checkpointing: Checkpointing | None = None) -> Costs | None:
        """Bytes of microbatches, if all of them use `checkpointing`."""
        split = frozenset(stage for stage, _ in self.plan.schedule.split)
        timed = self.chunked_loss, self.sequence_length, self.image_tokens
        key = shape, checkpointing, self.axes, self.options, split, self.plan.stages, self.offloading, timed
        if key not in self.plan.known_sizes:
            sizes = self._measured(self.axes.local_shape(shape), checkpointing)
            self.plan.known_sizes[key] = sizes and replace(sizes, **self.durations(shape))
        return self.plan.known_sizes[key]

    def durations(self, shape: tuple[int, int]) -> dict[str, Any]:
        """The fields of Costs that are durations: each stage's multiply-adds for a document.

        shape: (rows, sequence) of a microbatch, whose logits may be large

        Waits for messages, and for the other axes, take none.
        """
        plan, checkpointing = self.plan, self.checkpointing
        depth = plan.schedule.placement.depth
        costs = model_costs(
            plan.source.model,
            plan.chain,
            self.sequence_length or shape[1],
            self.image_tokens,
            together=-(-shape[0] * shape[1] // self.axes.tp),  # a rank has a share of each token's logits
            chunked=self._defers_head,
            save=() if checkpointing is None else checkpointing.save,
            every=1 if checkpointing is None else checkpointing.every,
        )
        stages = costs.of_stages([stage.layers for stage in plan.stages[:depth]])
        names = ("forward", "input_grad", "weight_grad", "recomputed")
        return dict(zip(names, map(list, zip(*stages, strict=True)), strict=True))

    def timed(self, shape: tuple[int, int]) -> Costs:
        """The durations alone, what runs again included: known also where only a step shows the sizes.

        Raises what `recomputed` raises.
        """
        costs = Costs(**self.durations(shape))
        return mixed(self.plan.schedule, costs, costs, self.recomputed())

    def _measured(self, shape: tuple[int, int], checkpointing: Checkpointing | None) -> Costs | None:
        plan, by_stage = self.plan, list[StageSizes]()
        split = {stage for stage, _ in plan.schedule.split}
        known: dict[Hashable, StageSizes] = {}  # equal for stages of one size
        with nullcontext() if self.axes.tp == 1 else imagined("tp", self.axes.tp) as mesh:
            for stage in range(plan.schedule.placement.depth):
                info, layers = plan.info(stage), plan.layers_of(plan.source.model, stage)
                chosen = None if checkpointing is None or not layers else layers[0][0] % checkpointing.every
                kinds = tuple(layer_kind(layer) for _, layer in layers)
                alike = plan.chain.only_hidden_states and not plan.chain.prediction_layers
                own_key = None if alike else stage
                key = info.is_first, info.is_last, stage in split, chosen, kinds, own_key
                if key not in known:
                    sizes = self._of_stage(stage, shape, checkpointing, mesh, split=stage in split)
                    if sizes is None:
                        return None
                    known[key] = sizes
                by_stage.append(known[key])
        kept, in_forward, in_backward, _ = zip(*by_stage, strict=True)
        columns = zip(MicrobatchBytes._fields, zip(*kept, strict=True), strict=True)
        rows: dict[str, Any] = {name: list(column) for name, column in columns}
        rows |= {"bytes": rows["buffer"], "held_in_forward": in_forward, "held_in_backward": in_backward}
        costs = Costs(**rows)
        return costs if self.offloading is None else replace(costs, offload_ahead=self.offloading.ahead)

    def _of_stage(
        self,
        stage: int,
        shape: tuple[int, int],
        checkpointing: Checkpointing | None,
        mesh: DeviceMesh | None,
        *,
        split: bool,
    ) -> StageSizes | None:
        plan = self.plan
        part, layers = plan.model_of(stage, values=False), plan.stages[stage].layers
        return self._of_part(part, plan.info(stage), layers, plan.ends, shape, split, checkpointing, mesh)

    def _of_part(
        self,
        part: PreTrainedModel,
        info: StageInfo,
        layers: range,
        ends: Sequence[int],
        shape: tuple[int, int],
        split: bool,
        checkpointing: Checkpointing | None,
        mesh: DeviceMesh | None = None,
        watch: AroundOp | None = None,
    ) -> StageSizes | None:
        """Bytes of a microbatch on a part of the model, and the most while an op of it runs.

        Args:
            layers: indices in the whole model
            ends: for each part, the number of layers up to its end
            watch: as for `stage_sizes`
        """
        model, offload = self.plan.source.model, None
        self._cast(part)
        if mesh is not None:
            if self._defers_head:  # inside the wrappers of tp
                defer_head(part, self._defers_head)
            tensor_parallel(part, mesh, **self.options.of_tp())
        numbered = [(n, part.get_submodule(f"{self.plan.chain.layers}.{n}")) for n in layers]
        dtype = self.options.autocast
        autocast = None if dtype is None else AutocastWithoutValues(dtype)
        if checkpointing is not None:
            if autocast is not None:
                for _, layer in numbered:
                    cast_again(layer, autocast)
            install(numbered, checkpointing)
        if self.offloading is not None:
            offload = Offload(torch.device("cpu"), self.offloading.min_bytes)
            activation_offloading.install([layer for _, layer in numbered], self.offloading, offload)
        return stage_sizes(
            part,
            info,
            HFEdges(model, self.plan.chain, self.options.sharded.param_dtype, ends=ends),
            shape,
            split,
            taken(model),
            (mesh,) if mesh else (),
            defers_head=self._defers_head,
            autocast=autocast,
            offload=offload,
            watch=watch,
        )

    def _cast(self, part: PreTrainedModel) -> None:
        """Have `part` compute in FSDP2's dtype, which casts weights that it shards when it gathers them."""
        if (computed := self.options.sharded.param_dtype) is None:
            return
        compute_in(part, computed)
        for name, parameter in part.named_parameters():
            if self._local[name].whole:
                parameter.data = parameter.data.to(computed)

    @property
    def _defers_head(self) -> Chunked:
        return not self.axes.uses_fsdp and self.chunked_loss

    # ---- for a balanced layout

    def of_layers(self, limit: float, shape: tuple[int, int], *, recomputed: bool = False) -> Memory:
        """The memory of layers, and the limit of each stage, for `balance`.

        Each stage gets an equal part of its rank's limit, in which its largest number of live microbatches
        must fit, so that a rank's stages together stay below its limit.

        Args:
            limit: bytes of a rank
            shape: (rows, sequence) of a microbatch
            recomputed: whether every layer's forward runs again in the backward, by `checkpointing`

        Raises ModelError where the activations are unknown before a step.
        """
        schedule, chain = self.plan.schedule, self.plan.chain
        measure = partial(self._of_range, shape, self.checkpointing if recomputed else None)
        kinds = [layer_kind(layer) for layer in self.plan.source.model.get_submodule(chain.layers).children()]
        first = {kind: kinds.index(kind) for kind in kinds}
        alike = {kind: measure(range(layer, layer + 1), 1) for kind, layer in first.items()}
        weights, activations, in_backward = zip(*(alike[kind] for kind in kinds), strict=True)
        embedding, head = measure(range(0), 0), measure(range(chain.count, chain.count), 2)
        working = max(in_backward)  # one layer's backward runs at a time
        most_stages = max(len(schedule.placement.stages_of(rank)) for rank in range(schedule.ranks))
        depth = schedule.placement.depth
        return Memory(
            max(limit - working, 0) / most_stages,
            weights,
            activations,
            [max(self._most_live[stage::depth]) for stage in range(depth)],  # for two copies, the larger
            embedding[:2],
            (head[0] + max(head[2] - working, 0), head[1]),
        )

    def of_part(
        self,
        shape: tuple[int, int],
        layers: range,
        stage: int,
        checkpointing: Checkpointing | None = None,
        watch: AroundOp | None = None,
        *,
        split: bool = True,
    ) -> StageSizes:
        """Bytes of a microbatch on one part of the model.

        Args:
            layers: of the part, none for the embedding or the head
            stage: 0 for the embedding, 1 for layers, 2 for the head
            split: whether its backward is split

        Raises ModelError where the activations are unknown before a step.
        """
        model, chain, info = self.plan.source.model, self.plan.chain, StageInfo(stage, 3)
        ends = (layers.start, layers.stop, chain.count)
        with nullcontext() if self.axes.tp == 1 else imagined("tp", self.axes.tp) as mesh:
            part = cut(model, chain, layers, info, values=False)
            local = self.axes.local_shape(shape)
            sizes = self._of_part(part, info, layers, ends, local, split, checkpointing, mesh, watch)
        if sizes is None:
            raise self._unknown()
        return sizes

    def _unknown(self) -> ModelError:
        return ModelError(
            f"the activations of {type(self.plan.source.model).__name__}",
            "its forward reads values, and an estimate has none",
            "Measure them, and give balance a Memory of your own",
        )

    def _of_range(
        self, shape: tuple[int, int], checkpointing: Checkpointing | None, layers: range, stage: int
    ) -> tuple[int, int, int]:
        """Bytes of weights, of a microbatch, and of more of it while an op of it runs.

        If a microbatch has more bytes between I and W, these count.

        Args:
            stage: 0 for the embedding, 1 for layers, 2 for the head
        """
        model, chain, info = self.plan.source.model, self.plan.chain, StageInfo(stage, 3)
        part, ends = cut(model, chain, layers, info, values=False), (layers.start, layers.stop, chain.count)
        split, local = bool(self.plan.schedule.split), self.axes.local_shape(shape)
        estimate = self._of_part(part, info, layers, ends, local, split, checkpointing)
        if estimate is None:
            raise self._unknown()
        weights, _ = self._weights(dict(part.named_parameters()), adamw)
        sizes, in_forward, in_backward, _ = estimate
        activation = max(sizes.activation, sizes.held_for_weight)
        return weights.fixed, activation, max(in_forward - activation, in_backward - activation, 0)


def estimated_memory(plan: BuildPlan, limit: float, shape: tuple[int, int]) -> Memory:
    """`Account.of_layers` of a pipeline without other axes."""
    return Account(plan).of_layers(limit, shape)


def _mib(nbytes: float) -> str:
    return f"{math.ceil(nbytes / 2**20 * 10) / 10:g} MiB"
