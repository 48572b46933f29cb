"""AutoPipeline: a Hugging Face model, unchanged, as a pipeline."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from penstock.commit import MANIFEST, check_folder
from penstock.errors import ConfigError, ModelError
from penstock.models import weights
from penstock.models.balance import LayerCosts, Memory
from penstock.models.chain import Chain, find_chain
from penstock.models.estimates import parameter_costs, stage_memory
from penstock.models.hf import HFCall, HFEdges, activation_bytes, cut, refuse_what_would_not_show
from penstock.models.named_modules import named_split
from penstock.models.partition import balanced_split, check_ways, partition, to_layout
from penstock.models.protocol import StageInfo
from penstock.models.saved import SavedModel
from penstock.models.source import ModelLike, Source, open_source
from penstock.pipeline import Pipeline, own_stages
from penstock.runtime.loss import LossLike, as_loss
from penstock.runtime.shared import SharedWeights, of_replicas
from penstock.runtime.stage import Stage
from penstock.runtime.world import open_world
from penstock.schedule import Proof, Schedule, verify
from penstock.schedule.config import ScheduleLike, chosen_schedule
from penstock.schedule.layout import parse_layout


@dataclass(frozen=True)
class StageOutline:
    """One stage before it is built: where it runs and what it holds."""

    stage: int
    rank: int
    layers: range
    parameters: int
    parameter_bytes: int
    modules: tuple[str, ...]
    parameter_names: frozenset[str]


@dataclass(frozen=True)
class Outline:
    """Everything about a pipeline that is known without a weight: schedule, proof and stages."""

    schedule: Schedule
    proof: Proof
    stages: tuple[StageOutline, ...]
    source: Source
    chain: Chain

    def part(self, stage: int) -> PreTrainedModel:
        """The model of one stage, on the meta device unless the source has values."""
        return cut(self.source.model, self.chain, self.stages[stage].layers, self.info(stage))

    def info(self, stage: int) -> StageInfo:
        """Where the stage stands in its copy of the model."""
        depth = self.schedule.placement.depth
        return StageInfo(stage % depth, depth)

    def activation_bytes(self, shape: tuple[int, int]) -> tuple[int, ...] | None:
        """Bytes that one live microbatch of (rows, sequence) holds on each stage.

        None where the model's forward looks at values, so that only a real run can tell.
        """
        edges = HFEdges(self.source.model)
        sizes = []
        for stage in range(len(self.stages)):
            size = activation_bytes(self.part(stage), self.info(stage), edges, *shape)
            if size is None:
                return None
            sizes.append(size)
        return tuple(sizes)


@dataclass(frozen=True)
class AutoPipeline:
    """How to make a pipeline of a Hugging Face model; `build` makes it.

    schedule: a name (then `ranks` and `microbatches` are needed), or a Schedule
    loss_fn: None for next-token cross-entropy over labels as transformers takes them (unshifted, -100
        ignored); a function of (logits, microbatch) that returns the mean over the microbatch's rows; or an
        object with `weight` and `total` (penstock.runtime.loss.Loss)
    embedding_weight, head_weight: how many layers embedding and head count for when layers are dealt out
    layout, layers_per_stage, first_stage_layers and last_stage_layers, modules_per_stage: which layers go to
        which stage, said in one way at most and evenly where in none. A layout string such as Ett|(ttt|)*2tL
        (penstock.schedule.layout); a number for each stage, or one that is the most for all; the numbers of
        first and last stage, the rest evenly; the names of the modules on each stage. Stages may be empty.
    seed: of the initial values, where the model comes without any
    dtype, attention: as transformers names them; None takes the config's
    device: None takes the GPU of this process, or the CPU
    timeout: seconds that a rank waits for another before it gives up
    activation_checkpointing: hold only each layer's input, and run the layer again in the backward
    mesh: a DeviceMesh with an axis `pp`; None takes all processes for the pipeline
    """

    ranks: int | None = None
    schedule: ScheduleLike = "1f1b"
    microbatches: int | None = None
    loss_fn: LossLike = None
    embedding_weight: int = 1
    head_weight: int = 1
    layout: str | None = None
    layers_per_stage: int | Sequence[int] | None = None
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    modules_per_stage: Sequence[Sequence[str]] | None = None
    seed: int = 0
    dtype: torch.dtype | None = None
    attention: str | None = None
    device: torch.device | str | None = None
    timeout: float = 300.0
    activation_checkpointing: bool = False
    mesh: DeviceMesh | None = None

    def outline(self, model: ModelLike) -> Outline:
        """All that `build` would refuse, found without reading a weight or joining other processes.

        Raises ConfigError, ScheduleError, ModelError, PartitionError, CheckpointError.
        """
        check_ways(**self._ways(), modules_per_stage=self.modules_per_stage)
        if self.layout is not None:
            parse_layout(self.layout)  # before any file is looked at
        schedule = chosen_schedule(self.schedule, self.ranks, self.microbatches)
        proof = verify(schedule)
        if isinstance(model, str | Path) and (Path(model) / MANIFEST).is_file():
            check_folder(model)  # written by penstock: an altered file can be told, and would load in silence
        source = open_source(model, self.dtype, self.attention)
        refuse_what_would_not_show(source.model)
        chain = find_chain(source.model)
        depth = schedule.placement.depth
        shares = self._shares(source.model, chain, depth)
        stages = tuple(
            _outline_stage(source.model, chain, stage, schedule, shares[stage % depth])
            for stage in range(schedule.stages)
        )
        return Outline(schedule, proof, stages, source, chain)

    def build(self, model: ModelLike) -> Pipeline:
        """The pipeline of `model`: a transformers model, a config of one, or a local folder.

        A model with values is copied, stage by stage, and left as it was; a folder's weights are read, each
        rank its own; a config or a folder without weights gets initial values from `seed`. Under torchrun
        this process becomes one rank; otherwise it holds them all.
        A model in evaluation mode, as from_pretrained gives it, becomes a pipeline in training mode.
        Raises what `outline` raises, and WorldSizeError.
        """
        outline = self.outline(model)
        schedule, source = outline.schedule, outline.source
        world = open_world(schedule, self.mesh, self.device, self.timeout)
        ties = weights.tied_names(source.model)
        stages = []
        for index in own_stages(schedule, world):
            part = outline.part(index)
            self._fill(part, source, ties)
            if self.activation_checkpointing:
                checkpoint_layers(part)
            if not part.training:
                part.train()
            call = HFCall(part.to(world.device), outline.info(index))
            stages.append(Stage(index, part, call))
        generation = getattr(source.model, "generation_config", None)
        saved = SavedModel(source.model.config, generation, ties, schedule.placement.depth)
        shared = _shared_weights(ties, outline, {stage.index: stage.module for stage in stages})
        edges, loss = HFEdges(source.model), as_loss(self.loss_fn, {})
        return Pipeline(schedule, world, stages, edges, loss, shared=shared, saved=saved)

    def _ways(self) -> dict[str, Any]:
        return {
            "layout": self.layout,
            "layers_per_stage": self.layers_per_stage,
            "first_stage_layers": self.first_stage_layers,
            "last_stage_layers": self.last_stage_layers,
        }

    def _shares(self, model: PreTrainedModel, chain: Chain, stages: int) -> list[range]:
        """The layers of each stage."""
        if self.modules_per_stage is not None:
            known = {n: any(True for _ in m.parameters()) for n, m in model.named_modules() if n}
            return named_split(self.modules_per_stage, stages, chain, known)
        return partition(
            chain.count,
            stages,
            **self._ways(),
            embedding_weight=self.embedding_weight,
            head_weight=self.head_weight,
        )

    def _fill(self, part: PreTrainedModel, source: Source, ties: weights.Ties) -> None:
        """Give values to a stage that is still on the meta device."""
        if source.files:
            weights.load(part, source.files, ties)
        weights.initialise(part, source.model, ties, self.seed)


def balance(outline: Outline, costs: LayerCosts | None = None, memory: Memory | None = None) -> str:
    """The layout string of the balanced split: its slowest stage is as fast as the stages allow.

    costs: as measured, in any unit; None takes parameters for a measure
    memory: what a stage may hold, such as `estimated_memory` gives; None sets no limit

    Raises ConfigError, and PartitionError where no split fits into the memory.
    """
    costs = costs or parameter_costs(outline.source.model, outline.chain)
    if len(costs.layers) != outline.chain.count:
        rule = f"the model has {outline.chain.count} layers, and each has one"
        raise ConfigError(f"costs of {len(costs.layers)} layers", rule, f"Give {outline.chain.count}")
    split = balanced_split(
        costs.layers,
        outline.schedule.placement.depth,
        embedding_cost=costs.embedding,
        head_cost=costs.head,
        memory=memory,
    )
    return to_layout(split)


def estimated_memory(outline: Outline, limit: float, shape: tuple[int, int]) -> Memory:
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


def _outline_stage(
    model: PreTrainedModel, chain: Chain, stage: int, schedule: Schedule, layers: range
) -> StageOutline:
    depth = schedule.placement.depth
    info = StageInfo(stage % depth, depth)
    modules = [f"{chain.layers}.{layer}" for layer in layers]
    modules = [*(chain.before if info.is_first else ()), *modules, *(chain.after if info.is_last else ())]
    held = {
        f"{module}.{name}": parameter
        for module in modules
        for name, parameter in model.get_submodule(module).named_parameters()
    }
    weights_once = {id(parameter): parameter for parameter in held.values()}.values()
    return StageOutline(
        stage,
        schedule.placement.rank_of[stage],
        layers,
        sum(parameter.numel() for parameter in weights_once),
        sum(parameter.nbytes for parameter in weights_once),
        tuple(modules),
        frozenset(held),
    )


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Turn on the model's own activation checkpointing. Raises ModelError where it has none."""
    if not model.supports_gradient_checkpointing:
        raise ModelError(
            f"activation_checkpointing=True for {type(model).__name__}",
            "transformers has no activation checkpointing for this model",
            "Turn it off",
        )
    # not the public method: it also reaches for the input embeddings, which later stages do not have
    model._set_gradient_checkpointing(
        enable=True, gradient_checkpointing_func=functools.partial(checkpoint, use_reentrant=False)
    )


def _shared_weights(
    ties: weights.Ties, outline: Outline, modules: Mapping[int, nn.Module]
) -> list[SharedWeights]:
    """The weights that stand on several stages: tied ones, and all where the model has two copies."""
    shared = []
    tied: set[str] = set()
    for names in ties:
        holders = [o for o in outline.stages if o.parameter_names.intersection(names)]
        if len(holders) < 2:
            continue
        tied.update(names)
        copies = [
            modules[holder.stage].get_parameter(next(n for n in names if n in holder.parameter_names))
            for holder in holders
            if holder.stage in modules
        ]
        ranks = tuple(sorted({o.rank for o in holders}))
        shared.append(SharedWeights(ranks, (tuple(copies),) if copies else ()))
    return [*shared, *of_replicas(outline.schedule.placement, modules, frozenset(tied))]
