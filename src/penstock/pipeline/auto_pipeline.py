"""AutoPipeline: a Hugging Face model, unchanged, as a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from penstock.errors import ConfigError
from penstock.models.huggingface.boundary import compute_in
from penstock.models.huggingface.stages import HFCall, HFEdges, refuse_what_would_not_show
from penstock.models.module_names import ModuleNames, named_split
from penstock.models.partition import LayerCosts, check_one_description, partition
from penstock.models.source import ModelLike, Source, open_source
from penstock.models.tracing.chain import Chain, find_chain
from penstock.models.tracing.meta import outlined, placed, shadow
from penstock.models.weights import files as weights
from penstock.models.weights import initial
from penstock.models.weights.folder import MANIFEST, check_folder
from penstock.models.weights.saved import SavedModel
from penstock.parallel.expert.balance import asks_for_balance
from penstock.parallel.expert.replay import ModelRouting
from penstock.parallel.mesh import Axes
from penstock.parallel.mesh_plan import MeshPlan, check_model
from penstock.parallel.world import World, close_on_error, open_world
from penstock.pipeline.build_plan import BuildPlan, plan_stage, shared_weights
from penstock.pipeline.built import BuiltStages, names_in
from penstock.pipeline.checks import check_fits, check_options
from penstock.pipeline.functional import Spread, make_stage, own_stages
from penstock.pipeline.options import Options
from penstock.pipeline.pipeline import Pipeline
from penstock.runtime.health.agreement import compare_values
from penstock.runtime.sharded_weights import give_storage
from penstock.runtime.stage import Shards, Stage
from penstock.runtime.transport.groups import AllProcesses
from penstock.schedule import Costs, verify
from penstock.schedule.layout import parse_layout
from penstock.schedule.recompute import mixed


@dataclass(frozen=True)
class AutoPipeline(Options):
    """How to make a pipeline of a Hugging Face model; `build` makes it.

    All of Options, and:

    embedding_weight, head_weight: how many layers embedding and head count for when layers are dealt out
    layout, layers_per_stage, first_stage_layers and last_stage_layers, modules_per_stage, balance: which
        layers go to which stage, said in one way at most and evenly where in none. A layout string such as
        Ett|(ttt|)*2tL (penstock.schedule.layout); a number for each stage, or one that is the most for all;
        the numbers of first and last stage, the rest evenly; the names of the modules on each stage; what
        each layer costs, as Pipeline.layer_costs measures it. Stages may be empty.
    module_fqns_per_stage: the same as modules_per_stage, by the name that torch gives it
    seed: of the initial values, where the model comes without any
    dtype, attention: as transformers names them; None takes the config's
    replay_routing: whether what activation checkpointing runs again chooses the experts that were chosen
        before, however nearly others are tied with them. Steps take `routed_experts` then, the experts that
        tokens are to choose, and `Pipeline.routed_experts` tells which ones they chose
    """

    embedding_weight: int = 1
    head_weight: int = 1
    layout: str | None = None
    layers_per_stage: int | Sequence[int] | None = None
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    modules_per_stage: Sequence[Sequence[str]] | None = None
    module_fqns_per_stage: Sequence[Sequence[str]] | None = None
    balance: LayerCosts | Sequence[float] | None = None
    seed: int = 0
    dtype: torch.dtype | None = None
    attention: str | None = None
    replay_routing: bool = False

    def outline(self, model: ModelLike) -> BuildPlan:
        """All that `build` would refuse, found without reading a weight or joining other processes.

        Raises ConfigError, ScheduleError, ModelError, PartitionError, CheckpointError.
        """
        check_one_description(
            **self._ways(),
            modules_per_stage=self.modules_per_stage,
            module_fqns_per_stage=self.module_fqns_per_stage,
        )
        if self.layout is not None:
            parse_layout(self.layout)  # before any file is looked at
        schedule = self.chosen_schedule()
        proof = verify(schedule)
        check_options(self.axes or Axes(), self.sharded, self.loss())
        if isinstance(model, str | Path) and (Path(model) / MANIFEST).is_file():
            check_folder(model)  # written by penstock: an altered file can be told, and would load in silence
        source = open_source(model, self.dtype, self.attention)
        refuse_what_would_not_show(source.model)
        ways = self.ways()
        if self.axes is not None:
            check_model(source.model, self.axes, ways)
        routed = self._routed(source.model)
        chain = find_chain(source.model)
        if self.axes is not None:
            check_fits(source.model, chain, self.axes, ways, trains=schedule.trains)
        if self.exchange == "batched" and not chain.plain:
            raise ConfigError(
                f"exchange='batched' for {type(source.model).__name__}",
                "more than hidden states crosses its edges, so that a message tells itself, in two parts",
                "Take exchange='channels'",
            )
        depth = schedule.placement.depth
        shares = self._shares(source.model, chain, depth)
        stages = tuple(
            plan_stage(source.model, chain, stage, schedule, shares[stage % depth])
            for stage in range(schedule.stages)
        )
        outline = BuildPlan(schedule, proof, stages, source, chain, routed)
        if self.axes is None or self.axes.resolved:
            outline.recomputed(self.checkpointing(), self.axes)  # for its refusals
        return outline

    def build(self, model: ModelLike) -> Pipeline:
        """The pipeline of `model`: a transformers model, a config of one, or a local folder.

        A model with values is copied, stage by stage, and left as it was; a folder's weights are read, each
        rank its own; a config or a folder without weights gets initial values from `seed`. Under torchrun
        this process becomes one rank; otherwise it holds them all.
        A model in evaluation mode, as from_pretrained gives it, becomes a pipeline in training mode.
        Raises what `outline` raises, and WorldSizeError.
        """
        outline = self.outline(model)
        world = open_world(outline.schedule, self.link(), {**self.facts(), **self._facts_of(outline)})
        with close_on_error(world.transport):
            return Pipeline(self._parts(outline, world))

    def _parts(self, outline: BuildPlan, world: World) -> BuiltStages:
        schedule, source = outline.schedule, outline.source
        ties = weights.tied_names(source.model)
        beside = self.beside(world)
        if beside is not None:  # by now sizes of -1 are known
            check_options(beside.axes, self.sharded, self.loss())
            check_model(source.model, beside.axes, self.ways())
            check_fits(source.model, outline.chain, beside.axes, self.ways(), trains=schedule.trains)
        if not world.alone:
            everyone = world.processes if beside is None else AllProcesses(self.timeout, world.device)
            (rank,) = world.ranks
            values = outline.given_values(rank, ties)
            compare_values(everyone, rank, values, outline.on_several_ranks(ties))
        make = self._filled if beside is None else self._empty
        parts = {index: make(outline, index, ties) for index in own_stages(schedule, world.ranks)}
        names = {index: names_in(part) for index, part in parts.items()}
        stages = [
            self._stage(outline, index, part, world.device)
            if beside is None
            else self._spread_stage(outline, index, part, world.device, beside, ties)
            for index, part in parts.items()
        ]
        modules = {stage.index: stage.module for stage in stages}
        generation = getattr(source.model, "generation_config", None)
        files = source.read_beside() if world.processes.index == 0 else {}  # who writes them
        return BuiltStages(
            schedule,
            world,
            stages,
            {index: outline.own_layers(module, index) for index, module in modules.items()},
            None
            if self.shapes == "exchanged" or not outline.chain.plain
            else HFEdges(source.model, outline.chain, None if beside is None else beside.param_dtype),
            self.loss(),
            self.splitter(beside, outline.completed(), counts_tokens=asks_for_balance(source.model)),
            shared=shared_weights(outline, ties, modules),
            saved=SavedModel(source.model.config, generation, ties, schedule.placement.depth, files),
            names=names,
            recomputed=outline.recomputed(self.checkpointing(), None if beside is None else beside.axes),
            trace_folder=self.trace_folder,
        )

    def _facts_of(self, outline: BuildPlan) -> dict[str, str]:
        """What of the model has to be the same on every rank."""
        given = outline.source.model.device != torch.device("meta")
        values = "the model's own" if given else "a folder's" if outline.source.files else f"seed {self.seed}"
        return {**outline.facts, "values": values, "replay_routing": str(self.replay_routing)}

    def _filled(self, outline: BuildPlan, index: int, ties: weights.Ties) -> PreTrainedModel:
        """The stage's part of the model, with values, in training mode."""
        part = outline.part(index)
        self._fill(part, outline.source, ties)
        return part if part.training else part.train()

    def _empty(self, outline: BuildPlan, index: int, ties: weights.Ties) -> PreTrainedModel:
        """The same without values."""
        part = outline.part(index, values=False)
        if outline.source.files:
            weights.check(part, outline.source.files, ties)
        return part if part.training else part.train()

    def _spread_stage(
        self,
        outline: BuildPlan,
        index: int,
        part: PreTrainedModel,
        device: torch.device,
        beside: MeshPlan,
        ties: weights.Ties,
    ) -> Stage:
        """Laid out over the mesh while it is on the meta device, so that no rank ever holds all of it."""
        given = outlined(part)
        placed(part, device)
        beside.parallelize(part)
        if beside.param_dtype is not None:
            compute_in(part, beside.param_dtype)

        def fill() -> None:
            give_storage(part, device)
            self._fill(given, outline.source, ties)

        def spread(module: nn.Module, layers: Sequence[nn.Module]) -> Shards | None:
            shards = beside.fully_shard(module, layers)
            if self.parallelize_fn is None:
                fill()
            return shards

        if self.parallelize_fn is not None:  # it gets a module with values
            fill()
        return self._stage(outline, index, part, device, spread)

    def _stage(
        self,
        outline: BuildPlan,
        index: int,
        part: PreTrainedModel,
        device: torch.device,
        spread: Spread | None = None,
    ) -> Stage:
        info = outline.info(index)
        return make_stage(
            index,
            part,
            device,
            layers=outline.own_layers(part, index),
            checkpointing=self.checkpointing(),
            parallelize_fn=self.parallelize_fn,
            call=lambda part: HFCall(part, info),
            routing=None if outline.routed is None else outline.routed.for_stage(part),
            after={name: part.get_submodule(name) for name in outline.chain.after} if info.is_last else None,
            place=info.stage,
            spread=spread,
            placed=spread is not None,
        )

    def _routed(self, model: PreTrainedModel) -> ModelRouting | None:
        """Raises ConfigError, ModelError where what its routers choose cannot be replayed."""
        if not self.replay_routing:
            return None
        with shadow(model) as without_values:
            return ModelRouting(without_values)

    def memory_costs(self, outline: BuildPlan, shape: tuple[int, int]) -> Costs | None:
        """What microbatches of (rows, sequence) will hold, in bytes, for `simulate` to add up.

        The durations are those of Costs(). None where only a real run can tell. Not with axes of -1.
        """
        how, shape = self.checkpointing(), (self.axes or Axes()).local_shape(shape)
        if how is None:
            return outline.sizes(shape)
        sizes = outline.sizes_either_way(how, shape)
        return None if sizes is None else mixed(outline.schedule, *sizes, outline.recomputed(how, self.axes))

    def _ways(self) -> dict[str, Any]:
        return {
            "layout": self.layout,
            "layers_per_stage": self.layers_per_stage,
            "first_stage_layers": self.first_stage_layers,
            "last_stage_layers": self.last_stage_layers,
            "balance": self.balance,
        }

    def _shares(self, model: PreTrainedModel, chain: Chain, stages: int) -> list[range]:
        """The layers of each stage."""
        named = self.modules_per_stage or self.module_fqns_per_stage
        if named is not None:
            known = {n: any(True for _ in m.parameters()) for n, m in model.named_modules() if n}
            return named_split(named, stages, ModuleNames.of(chain), known)
        return partition(
            chain.count,
            stages,
            **self._ways(),
            embedding_weight=self.embedding_weight,
            head_weight=self.head_weight,
        )

    def _fill(self, part: PreTrainedModel, source: Source, ties: weights.Ties) -> None:
        """Give values to a stage that is still on the meta device; an `outlined` one passes them on."""
        if source.files:
            weights.load(part, source.files, ties)
        else:
            weights.copy_values(part, source.model)
        initial.initialise(part, source.model, ties, self.seed)
