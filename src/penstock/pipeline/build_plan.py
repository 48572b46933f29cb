"""What is known of a pipeline before it is built: its stages, what they hold, how they balance."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from penstock.errors import ConfigError, ModelError
from penstock.models.activation_checkpointing import Checkpointing, install
from penstock.models.costs import COPIES, parameter_costs, stage_memory, stage_sizes
from penstock.models.huggingface.stages import Completed, HFEdges, cut
from penstock.models.module_names import ModuleNames
from penstock.models.partition import LayerCosts, Memory, as_layer_costs, balanced_split, to_layout
from penstock.models.source import Source
from penstock.models.stage import StageInfo
from penstock.models.tracing.chain import Chain
from penstock.models.weights.files import Ties
from penstock.parallel.expert.replay import ModelRouting
from penstock.parallel.mesh import Axes
from penstock.pipeline.options import recomputed_places
from penstock.runtime.health.agreement import flat
from penstock.runtime.memory import Sizes
from penstock.runtime.shared_weights import SharedWeights, of_replicas, place
from penstock.schedule import Costs, Proof, Schedule, simulate
from penstock.schedule.recompute import Places, counts_within, first_in_flight, mixed


@dataclass(frozen=True)
class StagePlan:
    """One stage before it is built: where it runs and what it holds."""

    stage: int
    rank: int
    layers: range
    parameters: int
    parameter_bytes: int
    modules: tuple[str, ...]
    parameter_names: frozenset[str]


@dataclass(frozen=True)
class BuildPlan:
    """Everything about a pipeline that is known without a weight: schedule, proof and stages."""

    schedule: Schedule
    proof: Proof
    stages: tuple[StagePlan, ...]
    source: Source
    chain: Chain
    routed: ModelRouting | None = None  # the mixtures whose choices are replayed

    @property
    def facts(self) -> dict[str, str]:
        """What of the model has to be the same on every rank."""
        model = self.source.model
        return {
            "model": type(model).__name__,
            **flat("config", {k: v for k, v in model.config.to_dict().items() if not k.startswith("_")}),
            "dtype": str(model.dtype),
            "transformers": transformers.__version__,
            "attention": str(model.config._attn_implementation),
            "layers of the stages": " ".join(f"{s.layers.start}-{s.layers.stop}" for s in self.stages),
        }

    def given_values(self, rank: int, ties: Ties) -> dict[str, Tensor]:
        """The parameters of a pipeline's rank, of a model that was given with values; none of another.

        A tied one is called by the first of its names.
        """
        model = self.source.model
        if model.device == torch.device("meta"):
            return {}
        return {name: model.get_parameter(name) for name in sorted(self._names(rank, ties))}

    def on_several_ranks(self, ties: Ties) -> set[str]:
        """The names of parameters, as `given_values` has them, that several ranks of the pipeline hold."""
        ranks = sorted({stage.rank for stage in self.stages})
        count = Counter(name for rank in ranks for name in self._names(rank, ties))
        return {name for name, holders in count.items() if holders > 1}

    def _names(self, rank: int, ties: Ties) -> set[str]:
        first = {name: names[0] for names in ties for name in names}
        own = {name for stage in self.stages if stage.rank == rank for name in stage.parameter_names}
        return {first.get(name, name) for name in own}

    def part(self, stage: int, *, values: bool = True) -> PreTrainedModel:
        """The model of one stage, on the meta device unless the source has values, and those are wanted."""
        return cut(self.source.model, self.chain, self.stages[stage].layers, self.info(stage), values=values)

    def info(self, stage: int) -> StageInfo:
        """Where the stage stands in its copy of the model."""
        depth = self.schedule.placement.depth
        return StageInfo(stage % depth, depth)

    def completed(self) -> Completed:
        """What adds to a microbatch what the model needs of it, and refuses what it would get wrong."""
        return Completed(self.source.model, None if self.routed is None else self.routed.check)

    def sizes(self, shape: tuple[int, int], how: Checkpointing | None = None) -> Costs | None:
        """What microbatches of (rows, sequence) hold, in bytes, with all their layers checkpointed as `how`
        says.

        The durations are those of Costs(). None where the model's forward looks at values, so that only a
        real run can tell (Pipeline.costs).
        """
        edges, found = HFEdges(self.source.model, self.chain), []
        split = {stage for stage, _ in self.schedule.split}
        for stage in range(self.schedule.placement.depth):
            part = self.part(stage, values=False)  # only its shapes count
            if how is not None:
                install(self.own_layers(part, stage), how)
            sizes = stage_sizes(part, self.info(stage), edges, shape, stage in split)
            if sizes is None:
                return None
            found.append(sizes)
        columns = zip(Sizes._fields, zip(*found, strict=True), strict=True)
        return Costs(**{name: list(column) for name, column in columns})  # type: ignore[arg-type]

    def own_layers(self, part: PreTrainedModel, stage: int) -> list[tuple[int, nn.Module]]:
        """The layers of one stage in its model, with their numbers."""
        layers = part.get_submodule(self.chain.layers)
        return [(layer, layers.get_submodule(str(layer))) for layer in self.stages[stage].layers]

    def weight_bytes(self, rank: int, axes: Axes) -> int:
        """Of what a process of a rank holds of weights, with their gradients and AdamW's two moments; where
        they are spread, the whole weights and gradients of a step too. What tp and ep share out counts whole.
        """
        whole = sum(stage.parameter_bytes for stage in self.stages if stage.rank == rank)
        return COPIES * whole if axes.shards == 1 else -(-COPIES * whole // axes.shards) + 2 * whole

    def recomputed(self, how: Checkpointing | None, axes: Axes | None = None) -> Places:
        """The (stage, microbatch) whose layers run again in the backward.

        axes: those beside the pipeline, without -1
        Raises ConfigError where even all of them leave more than a memory limit.
        """
        if how is None or how.memory_limit is None:
            return recomputed_places(self.schedule, how)
        assert how.shape is not None
        axes = axes or Axes()
        sizes = self.sizes_either_way(how, axes.local_shape(how.shape))
        if sizes is None:
            raise ConfigError(
                f"memory_limit for {type(self.source.model).__name__}",
                "its forward looks at values, so that its activations cannot be told beforehand",
                "Give in_flight, from what Pipeline.memory tells of a run",
            )
        kept, again = sizes
        weights = [self.weight_bytes(rank, axes) for rank in range(self.schedule.ranks)]
        least = simulate(
            self.schedule, mixed(self.schedule, kept, again, first_in_flight(self.schedule, None))
        )
        needed = [held + weight for held, weight in zip(least.peak_memory, weights, strict=True)]
        if max(needed) > how.memory_limit:
            rank = needed.index(max(needed))
            raise ConfigError(
                f"memory_limit={_mib(how.memory_limit)}",
                f"rank {rank} takes {_mib(weights[rank])} for weights, gradients and AdamW's moments, and "
                f"{_mib(least.peak_memory[rank])} more with every forward run again",
                f"Give {_mib(needed[rank])} or more, or take more ranks, a larger dp_shard or smaller "
                "microbatches",
            )
        limits = [how.memory_limit - weight for weight in weights]
        return first_in_flight(self.schedule, counts_within(self.schedule, kept, again, limits))

    def sizes_either_way(self, how: Checkpointing, shape: tuple[int, int]) -> tuple[Costs, Costs] | None:
        """With all activations kept, and with all run again, when one layer's are there at a time.

        None where only a run can tell.
        """
        kept, again = self.sizes(shape), self.sizes(shape, how)
        if kept is None or again is None:
            return None
        placement, one = self.schedule.placement, range(self.schedule.microbatches)[:1]
        small, large = (c.rows("activation", placement, len(one)) for c in (again, kept))
        layers = [max(len(stage.layers), 1) for stage in self.stages]
        held = [s + (k - s) / n for (s,), (k,), n in zip(small, large, layers, strict=True)]
        return kept, replace(again, held_in_backward=held)


def _mib(nbytes: float) -> str:
    return f"{math.ceil(nbytes / 2**20 * 10) / 10:g} MiB"


def balance(outline: BuildPlan, costs: LayerCosts | None = None, memory: Memory | None = None) -> str:
    """The layout string of the balanced split: its slowest stage is as fast as the stages allow.

    costs: as measured, in any unit; None takes parameters for a measure
    memory: what a stage may hold, such as `estimated_memory` gives; None sets no limit

    Raises ConfigError, and PartitionError where no split fits into the memory.
    """
    costs = costs or parameter_costs(outline.source.model, outline.chain)
    costs = as_layer_costs(costs, outline.chain.count)
    split = balanced_split(
        costs.layers,
        outline.schedule.placement.depth,
        embedding_cost=costs.embedding,
        head_cost=costs.head,
        memory=memory,
    )
    return to_layout(split)


def estimated_memory(outline: BuildPlan, limit: float, shape: tuple[int, int]) -> Memory:
    """What the stages' parts hold, for `balance`; `limit` is in bytes a rank.

    shape: rows and sequence of a microbatch. Each stage gets an equal part of its rank's limit, and room for
    as many microbatches as it ever has live: together they then stay below the limit.
    Raises ModelError where only a run can tell the activations.
    """
    schedule = outline.schedule
    live, peaks = [0] * schedule.stages, [0] * schedule.stages
    for op in (op for program in schedule.programs for op in program):
        live[op.stage] += {"F": 1, "B": -1, "I": 0, "W": -1}[op.kind]
        peaks[op.stage] = max(peaks[op.stage], live[op.stage])
    depth = schedule.placement.depth  # where the model has copies, each slice has to fit wherever it stands
    most = [max(peaks[stage::depth]) for stage in range(depth)]
    hosted = max(len(schedule.placement.stages_of(rank)) for rank in range(schedule.ranks))
    return stage_memory(outline.source.model, outline.chain, shape, limit / hosted, most)


def plan_stage(
    model: PreTrainedModel, chain: Chain, stage: int, schedule: Schedule, layers: range
) -> StagePlan:
    depth = schedule.placement.depth
    info = StageInfo(stage % depth, depth)
    modules = ModuleNames.of(chain).on_stage(layers, info.is_first, info.is_last)
    held = {
        f"{module}.{name}": parameter
        for module in modules
        for name, parameter in model.get_submodule(module).named_parameters()
    }
    for name, is_before in chain.loose.items():
        if info.is_first if is_before else info.is_last:
            held[name] = model.get_parameter(name)
    weights_once = {id(parameter): parameter for parameter in held.values()}.values()
    return StagePlan(
        stage,
        schedule.placement.rank_of[stage],
        layers,
        sum(parameter.numel() for parameter in weights_once),
        sum(parameter.nbytes for parameter in weights_once),
        modules,
        frozenset(held),
    )


def shared_weights(outline: BuildPlan, ties: Ties, modules: Mapping[int, nn.Module]) -> list[SharedWeights]:
    """The weights that stand on several stages: tied ones, and all where the model has two copies."""
    shared = []
    tied: set[str] = set()
    for names in ties:
        holders = [o for o in outline.stages if o.parameter_names.intersection(names)]
        if len(holders) < 2:
            continue
        tied.update(names)
        here = {
            holder.stage: next(n for n in names if n in holder.parameter_names)
            for holder in holders
            if holder.stage in modules
        }
        copies = {place(name, stage): _tied(modules[stage], name) for stage, name in here.items()}
        ranks = tuple(sorted({o.rank for o in holders}))
        shared.append(SharedWeights(ranks, (copies,) if copies else ()))
    return [*shared, *of_replicas(outline.schedule.placement, modules, frozenset(tied))]


def _tied(module: nn.Module, name: str) -> nn.Parameter:
    try:
        return module.get_parameter(name)
    except AttributeError as cause:
        raise ModelError(
            f"parallelize_fn, after which there is no {name}",
            "another stage holds a copy of this weight, and their gradients are summed",
            "Leave its module as it is, or untie the model's weights",
        ) from cause
