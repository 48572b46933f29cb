"""AutoPipeline: a Hugging Face model, unchanged, as a pipeline."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from penstock.commit import MANIFEST, check_folder
from penstock.errors import ModelError
from penstock.models import weights
from penstock.models.chain import Chain, find_chain
from penstock.models.hf import HFCall, HFEdges, activation_bytes, cut, refuse_what_would_not_show
from penstock.models.partition import even_split
from penstock.models.protocol import StageInfo
from penstock.models.saved import SavedModel
from penstock.models.source import ModelLike, Source, open_source
from penstock.pipeline import Pipeline, own_stages
from penstock.runtime.loss import LossLike, as_loss
from penstock.runtime.shared import SharedWeight
from penstock.runtime.stage import Stage
from penstock.runtime.world import open_world
from penstock.schedule import Proof, Schedule, verify
from penstock.schedule.builders import named_schedule


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
        info = StageInfo(stage, len(self.stages))
        return cut(self.source.model, self.chain, self.stages[stage].layers, info)

    def activation_bytes(self, shape: tuple[int, int]) -> tuple[int, ...] | None:
        """Bytes that one live microbatch of (rows, sequence) holds on each stage.

        None where the model's forward looks at values, so that only a real run can tell.
        """
        edges = HFEdges(self.source.model)
        sizes = []
        for stage in range(len(self.stages)):
            size = activation_bytes(self.part(stage), StageInfo(stage, len(self.stages)), edges, *shape)
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
    seed: of the initial values, where the model comes without any
    dtype, attention: as transformers names them; None takes the config's
    device: None takes the GPU of this process, or the CPU
    timeout: seconds that a rank waits for another before it gives up
    activation_checkpointing: hold only each layer's input, and run the layer again in the backward
    mesh: a DeviceMesh with an axis `pp`; None takes all processes for the pipeline
    """

    ranks: int | None = None
    schedule: str | Schedule = "1f1b"
    microbatches: int | None = None
    loss_fn: LossLike = None
    embedding_weight: int = 1
    head_weight: int = 1
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
        schedule = named_schedule(self.schedule, self.ranks, self.microbatches)
        proof = verify(schedule)
        if isinstance(model, str | Path) and (Path(model) / MANIFEST).is_file():
            check_folder(model)  # written by penstock: an altered file can be told, and would load in silence
        source = open_source(model, self.dtype, self.attention)
        refuse_what_would_not_show(source.model)
        chain = find_chain(source.model)
        shares = even_split(chain.count, schedule.stages, self.embedding_weight, self.head_weight)
        stages = tuple(
            _outline_stage(source.model, chain, stage, schedule, layers)
            for stage, layers in enumerate(shares)
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
            call = HFCall(part.to(world.device), StageInfo(index, schedule.stages))
            stages.append(Stage(index, part, call))
        generation = getattr(source.model, "generation_config", None)
        saved = SavedModel(source.model.config, generation, ties, schedule.stages)
        shared = _shared_weights(ties, outline, {stage.index: stage.module for stage in stages})
        edges, loss = HFEdges(source.model), as_loss(self.loss_fn, {})
        return Pipeline(schedule, world, stages, edges, loss, shared=shared, saved=saved)

    def _fill(self, part: PreTrainedModel, source: Source, ties: weights.Ties) -> None:
        """Give values to a stage that is still on the meta device."""
        if source.files:
            weights.load(part, source.files, ties)
        weights.initialise(part, source.model, ties, self.seed)


def _outline_stage(
    model: PreTrainedModel, chain: Chain, stage: int, schedule: Schedule, layers: range
) -> StageOutline:
    info = StageInfo(stage, schedule.stages)
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
) -> list[SharedWeight]:
    """The weights that stand on several stages."""
    shared = []
    for names in ties:
        holders = [o for o in outline.stages if o.parameter_names.intersection(names)]
        if len(holders) < 2:
            continue
        copies = [
            modules[holder.stage].get_parameter(next(n for n in names if n in holder.parameter_names))
            for holder in holders
            if holder.stage in modules
        ]
        ranks = tuple(sorted({o.rank for o in holders}))
        shared.append(SharedWeight(ranks, tuple(copies)))
    return shared
