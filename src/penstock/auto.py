"""AutoPipeline: a Hugging Face model, unchanged, as a pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from penstock.commit import MANIFEST, check_folder
from penstock.models import weights
from penstock.models.chain import Chain, find_chain
from penstock.models.checkpointing import Checkpointing, checkpointing, install
from penstock.models.hf import Completed, HFCall, HFEdges, refuse_what_would_not_show
from penstock.models.named_modules import named_split
from penstock.models.partition import check_ways, partition
from penstock.models.saved import SavedModel
from penstock.models.source import ModelLike, Source, open_source
from penstock.outline import Outline, outline_stage
from penstock.pipeline import Pipeline, Shapes, as_padding, check_batched, own_stages
from penstock.runtime.handshake import flat, named
from penstock.runtime.loss import LossLike, as_loss
from penstock.runtime.microbatch import Sharding
from penstock.runtime.network import Network
from penstock.runtime.shared import SharedWeights, of_replicas
from penstock.runtime.stage import Stage
from penstock.runtime.world import Link, open_world
from penstock.schedule import Costs, verify
from penstock.schedule.config import ScheduleLike, chosen_schedule
from penstock.schedule.layout import parse_layout
from penstock.schedule.recompute import mixed
from penstock.steps import Cutter


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
    activation_checkpointing: hold less of each layer, and run it again in the backward. False or True,
        "full", "selective", or a Checkpointing: every k-th layer, by op, the first n microbatches in flight,
        or as many as a memory limit asks for
    shapes: how a rank knows what comes over an edge. "inferred": by arithmetic, before anything is sent;
        "exchanged": each message tells itself, for models whose shapes hang on the data's values; "padded",
        or a Padding: all microbatches of a step are made equal in length
    transport: "nccl", "gloo", "local", or None for what fits; exchange: "channels", or "batched" (see
        penstock.runtime.world.Link)
    wire_dtype: what floating-point tensors travel as; None leaves them as they are. Anything narrower than
        the model's dtype changes the gradients
    network: a penstock.runtime.network.Network to emulate, slower than what there is; for experiments
    sharding: how entries of a batch are cut, by name: along a dimension (0 for those not named), not at all
        (None), or by a function of (entry, number of microbatches)
    trace_folder: where each rank writes its timeline so far if a step fails; None writes none
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
    activation_checkpointing: bool | str | Checkpointing = False
    shapes: Shapes = "inferred"
    transport: str | None = None
    exchange: str = "channels"
    wire_dtype: torch.dtype | None = None
    network: Network | None = None
    sharding: Sharding | None = None
    trace_folder: str | Path | None = None
    mesh: DeviceMesh | None = None

    def outline(self, model: ModelLike) -> Outline:
        """All that `build` would refuse, found without reading a weight or joining other processes.

        Raises ConfigError, ScheduleError, ModelError, PartitionError, CheckpointError.
        """
        check_ways(**self._ways(), modules_per_stage=self.modules_per_stage)
        if self.layout is not None:
            parse_layout(self.layout)  # before any file is looked at
        self._link().check()
        as_padding(self.shapes)
        schedule = chosen_schedule(self.schedule, self.ranks, self.microbatches)
        proof = verify(schedule)
        if self.exchange == "batched":
            check_batched(schedule, self.shapes)
        if isinstance(model, str | Path) and (Path(model) / MANIFEST).is_file():
            check_folder(model)  # written by penstock: an altered file can be told, and would load in silence
        source = open_source(model, self.dtype, self.attention)
        refuse_what_would_not_show(source.model)
        chain = find_chain(source.model)
        depth = schedule.placement.depth
        shares = self._shares(source.model, chain, depth)
        stages = tuple(
            outline_stage(source.model, chain, stage, schedule, shares[stage % depth])
            for stage in range(schedule.stages)
        )
        outline = Outline(schedule, proof, stages, source, chain)
        outline.recomputed(checkpointing(self.activation_checkpointing))  # for its refusals
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
        schedule, source = outline.schedule, outline.source
        how, padding = checkpointing(self.activation_checkpointing), as_padding(self.shapes)
        recomputed = outline.recomputed(how)
        world = open_world(schedule, self._link(), self._facts(outline))
        ties = weights.tied_names(source.model)
        stages = []
        for index in own_stages(schedule, world):
            part = outline.part(index)
            self._fill(part, source, ties)
            switch = None if how is None else install(outline.own_layers(part, index), how)
            if not part.training:
                part.train()
            call = HFCall(part.to(world.device), outline.info(index))
            stages.append(Stage(index, part, call, switch))
        generation = getattr(source.model, "generation_config", None)
        saved = SavedModel(source.model.config, generation, ties, schedule.placement.depth)
        shared = _shared_weights(ties, outline, {stage.index: stage.module for stage in stages})
        return Pipeline(
            schedule,
            world,
            stages,
            None if self.shapes == "exchanged" else HFEdges(source.model),
            as_loss(self.loss_fn, self.sharding or {}),
            shared=shared,
            saved=saved,
            cutter=Cutter(self.sharding or {}, padding, Completed(source.model)),
            recomputed=recomputed,
            trace_folder=self.trace_folder,
        )

    def memory_costs(self, outline: Outline, shape: tuple[int, int]) -> Costs | None:
        """What microbatches of (rows, sequence) will hold, in bytes, for `simulate` to add up.

        The durations are those of Costs(). None where only a real run can tell.
        """
        how = checkpointing(self.activation_checkpointing)
        if how is None:
            return outline.sizes(shape)
        sizes = outline.sizes_either_way(how, shape)
        return None if sizes is None else mixed(outline.schedule, *sizes, outline.recomputed(how))

    def _link(self) -> Link:
        return Link(
            self.mesh, self.device, self.timeout, self.transport, self.wire_dtype, self.exchange, self.network
        )

    def _facts(self, outline: Outline) -> dict[str, str]:
        """What has to be the same on every rank beside the schedule."""
        model = outline.source.model
        return {
            "model": type(model).__name__,
            **flat("config", {k: v for k, v in model.config.to_dict().items() if not k.startswith("_")}),
            "dtype": str(model.dtype),
            "layers of the stages": " ".join(f"{s.layers.start}-{s.layers.stop}" for s in outline.stages),
            "shapes": str(self.shapes),
            "wire_dtype": str(self.wire_dtype),
            "activation_checkpointing": str(self.activation_checkpointing),
            "loss": named(self.loss_fn),
        }

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
