"""The plan of a build, made before any weight is read: schedule, proof, and the layers of each stage.

AutoPipeline.build_plan makes it; AutoPipeline.build follows it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from penstock.models.huggingface.entries import MicrobatchCompleter
from penstock.models.huggingface.stages import cut
from penstock.models.module_names import ModuleNames
from penstock.models.source import Source
from penstock.models.split.balanced_split import LayerCosts, Memory, as_layer_costs, balanced_split
from penstock.models.split.model_costs import model_costs
from penstock.models.split.partition import to_layout
from penstock.models.stage import StageInfo
from penstock.models.tracing.chain import Chain
from penstock.models.tracing.meta import is_empty, without_values
from penstock.models.weights.files import Ties, tied_names
from penstock.parallel.expert.replay import ModelRouting
from penstock.runtime.health.agreement import flat
from penstock.runtime.shared_weights import SharedWeights, copy_name, copy_of, shared_by_replicas
from penstock.schedule import Costs, Proof, Schedule


@dataclass(frozen=True)
class StagePlan:
    """A stage to build.

    layers: indices of its layers in the whole model; modules: names of its modules
    parameters, parameter_bytes: number of scalars, and their bytes; a weight with two names counts once
    """

    stage: int
    rank: int
    layers: range
    parameters: int
    parameter_bytes: int
    modules: tuple[str, ...]
    parameter_names: frozenset[str]


@dataclass(frozen=True)
class BuildPlan:
    """A pipeline without its weights.

    source: the whole model, on the meta device unless the caller gave one with values
    chain: how the model's forward calls its layers
    routed: the mixtures of experts whose routing is replayed, if any
    known_sizes: a cache of microbatch sizes for penstock.pipeline.building.memory
    """

    schedule: Schedule
    proof: Proof
    stages: tuple[StagePlan, ...]
    source: Source
    chain: Chain
    routed: ModelRouting | None = None
    known_sizes: dict[object, Costs | None] = field(default_factory=dict, repr=False, compare=False)

    def without_values(self) -> BuildPlan:
        """The same plan of a model without values, so that a pipeline does not keep the caller's weights."""
        model = self.source.model
        if is_empty(model):
            return self
        return replace(self, source=replace(self.source, model=without_values(model)))

    @property
    def facts(self) -> dict[str, str]:
        """Facts about the model that must be equal on every rank."""
        model = self.source.model
        return {
            "model": type(model).__name__,
            **flat("config", {k: v for k, v in model.config.to_dict().items() if not k.startswith("_")}),
            "dtype": str(model.dtype),
            "transformers": transformers.__version__,
            "attention": str(model.config._attn_implementation),
            "commit": str(self.source.commit),
            "experts": str(model.config.get_text_config()._experts_implementation),
            "layers of the stages": " ".join(f"{s.layers.start}-{s.layers.stop}" for s in self.stages),
            **flat("adapter", {} if self.source.adapter is None else self.source.adapter.facts),
        }

    @property
    def frozen(self) -> frozenset[int]:
        """The stages that train nothing."""
        return frozen_stages(self.source.model, self.stages)

    @property
    def first_trained(self) -> int:
        """The first stage of a copy of the model that trains anything."""
        frozen = self.frozen
        return next((stage.stage for stage in self.stages if stage.stage not in frozen), 0)

    @property
    def shares_weights(self) -> bool:
        """Whether several stages have a copy of one weight: a tied one, or all of two model copies."""
        ties = tied_names(self.source.model)
        return self.schedule.placement.replicas > 1 or any(len(_holders(self, names)) > 1 for names in ties)

    @property
    def ends(self) -> list[int]:
        """For each stage, the number of layers up to its end."""
        return [stage.layers.stop for stage in self.stages]

    def info(self, stage: int) -> StageInfo:
        """The position of `stage` in its copy of the model."""
        depth = self.schedule.placement.depth
        return StageInfo(stage % depth, depth)

    def model_of(self, stage: int, *, values: bool = True) -> PreTrainedModel:
        """The model of one stage: on meta, unless `values` is true and the source has values."""
        return cut(self.source.model, self.chain, self.stages[stage].layers, self.info(stage), values=values)

    def layers_of(self, model: PreTrainedModel, stage: int) -> list[tuple[int, nn.Module]]:
        """The layers of `stage` in its model, with their indices."""
        layers = model.get_submodule(self.chain.layers)
        return [(layer, layers.get_submodule(str(layer))) for layer in self.stages[stage].layers]

    def completer(self) -> MicrobatchCompleter:
        """Adds entries that the model needs to a microbatch; refuses one that a split would get wrong."""
        checked = None if self.routed is None else self.routed.check
        return MicrobatchCompleter(self.source.model, self.chain, checked)

    def values_of(self, rank: int, ties: Ties) -> dict[str, Tensor]:
        """A rank's parameters, tied ones under their first name; empty if the source has no values."""
        model = self.source.model
        if model.device == torch.device("meta"):
            return {}
        return {name: model.get_parameter(name) for name in sorted(self._names(rank, ties))}

    def on_several_ranks(self, ties: Ties) -> set[str]:
        """Names, as in `values_of`, of the parameters that several ranks of the pipeline have."""
        ranks = {stage.rank for stage in self.stages}
        count = Counter(name for rank in ranks for name in self._names(rank, ties))
        return {name for name, holders in count.items() if holders > 1}

    def _names(self, rank: int, ties: Ties) -> set[str]:
        first = {name: names[0] for names in ties for name in names}
        names = {name for stage in self.stages if stage.rank == rank for name in stage.parameter_names}
        return {first.get(name, name) for name in names}


def plan_stages(
    model: PreTrainedModel, chain: Chain, schedule: Schedule, split: Sequence[range]
) -> tuple[StagePlan, ...]:
    """split: the layers of each stage of one copy of the model"""
    depth = schedule.placement.depth
    return tuple(
        _plan_stage(model, chain, stage, schedule, split[stage % depth]) for stage in range(schedule.stages)
    )


def _plan_stage(
    model: PreTrainedModel, chain: Chain, stage: int, schedule: Schedule, layers: range
) -> StagePlan:
    depth = schedule.placement.depth
    info = StageInfo(stage % depth, depth)
    modules = ModuleNames.of(chain).on_stage(layers, info.is_first, info.is_last)
    parameters = {
        f"{module}.{name}": parameter
        for module in modules
        for name, parameter in model.get_submodule(module).named_parameters()
    }
    for name, is_before in chain.direct_parameters.items():
        if info.is_first if is_before else info.is_last:
            parameters[name] = model.get_parameter(name)
    distinct = {id(parameter): parameter for parameter in parameters.values()}.values()
    return StagePlan(
        stage,
        schedule.placement.rank_of[stage],
        layers,
        sum(parameter.numel() for parameter in distinct),
        sum(parameter.nbytes for parameter in distinct),
        modules,
        frozenset(parameters),
    )


def frozen_stages(model: PreTrainedModel, stages: Sequence[StagePlan]) -> frozenset[int]:
    """The stages that train nothing."""
    trained = {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
    return frozenset(stage.stage for stage in stages if trained.isdisjoint(stage.parameter_names))


def shared_weights(plan: BuildPlan, ties: Ties, modules: Mapping[int, nn.Module]) -> list[SharedWeights]:
    """The weights that several stages share: tied ones, and all weights of two model copies.

    Raises ModelError where parallelize_fn renamed a tied weight.
    """
    shared = []
    tied: set[str] = set()
    for names in ties:
        holders = _holders(plan, names)
        if len(holders) < 2:
            continue
        tied.update(names)
        local = {
            holder.stage: next(name for name in names if name in holder.parameter_names)
            for holder in holders
            if holder.stage in modules
        }
        copies = {copy_name(name, stage): copy_of(modules[stage], name) for stage, name in local.items()}
        ranks = tuple(sorted({holder.rank for holder in holders}))
        shared.append(SharedWeights(ranks, (copies,) if copies else ()))
    return [*shared, *shared_by_replicas(plan.schedule.placement, modules, frozenset(tied))]


def _holders(plan: BuildPlan, names: Sequence[str]) -> list[StagePlan]:
    """The stages that have the tied weight of these names."""
    return [stage for stage in plan.stages if stage.parameter_names.intersection(names)]


# ---- a balanced layout


def balance(plan: BuildPlan, costs: LayerCosts | None = None, memory: Memory | None = None) -> str:
    """The layout string of the split whose slowest stage is fastest.

    Args:
        costs: measured, in any unit; None counts multiply-adds
        memory: limits of each stage, from `estimated_memory`; None: no limits

    Raises ConfigError, and PartitionError where no split fits into the memory.
    """
    costs = as_layer_costs(costs or model_costs(plan.source.model, plan.chain).of_step(), plan.chain.count)
    return to_layout(fastest_split(costs, plan.schedule, memory), plan.chain.prediction_layers)


def fastest_split(costs: LayerCosts, schedule: Schedule, memory: Memory | None = None) -> list[range]:
    """The split whose slowest rank costs least. Raises PartitionError where none fits into the memory."""
    placement = schedule.placement
    return balanced_split(costs, placement.depth, memory=memory, holders=placement.holders)
