"""The one file where a run's parts are wired together.

`preflight` finds everything that can be refused without a weight; it runs in the command before any rank is
started, and again in each rank. `run` then builds the pipeline and trains.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from penstock.batch.packing import refuse_packed
from penstock.batch.padding import Padding
from penstock.checkpoint.save_load import CheckpointWriter, load_checkpoint
from penstock.errors import ConfigError
from penstock.models.activation_checkpointing import Checkpointing
from penstock.models.source import ModelLike
from penstock.models.weights.files import weight_files
from penstock.parallel.mesh import Axes
from penstock.pipeline.auto_pipeline import AutoPipeline
from penstock.pipeline.build_plan import BuildPlan
from penstock.pipeline.pipeline import Pipeline
from penstock.train.check.split_beside_whole import check_split
from penstock.train.check.whole import Whole, narrowest
from penstock.train.config.sections import PipelineSection, TrainConfig
from penstock.train.config.values import CheckpointingSection
from penstock.train.data.loading import Data, load_data
from penstock.train.data.tokenizer import Tokenizer, open_tokenizer
from penstock.train.loop import Run, train
from penstock.train.metrics import Display, Metrics, make_display
from penstock.train.model import named_model, positions
from penstock.train.optimizer import by_muon, make_optimizers
from penstock.train.outcome import check_prompt, tell
from penstock.train.start import find_start
from penstock.train.world import axes_of, check_not_alone, is_first, pipeline_number, ranks_of


@dataclass(frozen=True)
class Prepared:
    """A run that nothing is known against.

    done: steps that lie behind, of which so many were `skipped`; notes: lines to show before it starts
    muons: names of the parameters that Muon trains
    """

    config: TrainConfig
    auto: AutoPipeline
    model: ModelLike
    outline: BuildPlan
    tokenizer: Tokenizer
    data: Data
    checkpoint: Path | None = None
    done: int = 0
    skipped: int = 0
    notes: tuple[str, ...] = ()
    muons: frozenset[str] = frozenset()

    @property
    def axes(self) -> Axes:
        return self.auto.axes or Axes()


def preflight(config: TrainConfig, resume: str | None = None) -> Prepared:
    """Everything that `run` needs and that takes no weight and no other process.

    resume: a checkpoint's path, NEWEST for the newest whole one of the output folder, None for a fresh start.
    Raises ConfigError, WorldSizeError, ModelError, PartitionError, CheckpointError, DataError.
    """
    axes = axes_of(config)
    _check_output(Path(config.output.folder).expanduser())
    model, auto = named_model(config.model), make_auto(config)
    outline = auto.outline(model)
    if not outline.schedule.trains:
        raise ConfigError(
            f"pipeline.schedule={outline.schedule.name}", "it holds no backward", "Take one that trains: 1f1b"
        )
    vocabulary = _check_model(config, outline)
    muons = by_muon(config.optimizer, outline.source.model, outline.chain.layers)
    start = find_start(config, outline, resume, muons)
    tokenizer = open_tokenizer(config.data.tokenizer or str(config.model.path))
    check_prompt(config.output, tokenizer, outline.source.model.config)
    flash = "flash" in str(outline.source.model.config._attn_implementation)  # as transformers itself asks
    padding = make_padding(config.pipeline)
    data = load_data(config, tokenizer, vocabulary, padding=padding, flash=flash, parts=axes.batch_parts)
    notes = start.notes + _padding_note(config, data)
    begun = (start.checkpoint, start.done, start.skipped)
    return Prepared(config, auto, model, outline, tokenizer, data, *begun, notes, muons)


def run(prepared: Prepared) -> None:
    """Train. Collective: every rank calls it with what its own preflight found."""
    config = prepared.config
    check_not_alone(prepared.axes)
    common = {"config": config.model_dump(mode="json"), "steps done": prepared.done}
    pipe = replace(prepared.auto, common=common).build(prepared.model)
    first = is_first()
    optimizers = make_optimizers(config.optimizer, pipe.named_parameters(), prepared.muons)
    if prepared.checkpoint is not None:
        load_checkpoint(prepared.checkpoint, pipe, optimizers, learning_rates=False)  # each step sets its own
    output = Path(config.output.folder).expanduser()
    output.mkdir(parents=True, exist_ok=True)
    (_traces(config, prepared.axes) / f"rank-{pipe.processes.index}.json").unlink(missing_ok=True)  # old ones
    metrics = Metrics(output / "metrics.jsonl", prepared.done or None) if first else None
    display = make_display(first, config.train.steps, prepared.done, config.train.log_every)
    with display, CheckpointWriter(pipe, background=config.train.checkpoint_background) as writer:
        for note in prepared.notes:
            display.say(note)
        _check_split(prepared, pipe, display)
        data = prepared.data.of(pipe.batch_part[0])
        parts = (config, pipe, data, optimizers, prepared.tokenizer, display, metrics, writer)
        outcome = train(Run(*parts, prepared.done, prepared.skipped))
    if metrics:
        tell(outcome, pipe.schedule, config, output)
    pipe.processes.gather(None)  # nobody leaves while process 0 still writes
    if dist.is_initialized() and prepared.axes.ranks_per_stage > 1:
        dist.barrier()  # nor does another pipeline
    pipe.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def _check_split(prepared: Prepared, pipe: Pipeline, display: Display) -> None:
    """The pipeline beside the whole model, as train.check says. Collective."""
    mode, folder = prepared.config.train.check, prepared.checkpoint
    if mode == "off" or (mode == "auto" and folder is not None):
        return
    source = prepared.outline.source
    if folder is not None:
        source = replace(source, files=tuple(weight_files(folder)))
    auto = prepared.auto
    narrow = (auto.wire_dtype, auto.sharded.param_dtype, auto.sharded.reduce_dtype)
    whole = Whole(source, auto.seed, auto.loss(), narrowest(narrow), prepared.axes)
    batch = prepared.data.of(0).batch(prepared.done + 1)  # the same one in every pipeline of a mesh
    display.say(check_split(pipe, whole, batch.content, mode))


def make_auto(config: TrainConfig) -> AutoPipeline:
    """The pipeline's settings, as the library takes them."""
    pipeline, model, section, axes = config.pipeline, config.model, config.train, axes_of(config)
    ranks = ranks_of(config)
    if pipeline.transport == "local" and (count := ranks * axes.ranks_per_stage) > 1:
        rule = f"it holds all ranks in one process, and {count} would be started"
        raise ConfigError("pipeline.transport=local", rule, "Leave it out, or set pipeline.ranks=1")
    if pipeline.transport == "nccl" and not torch.cuda.is_available():
        raise ConfigError(
            "pipeline.transport=nccl", "it moves GPU memory, and torch sees no GPU", "Take gloo"
        )
    if section.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("train.device=cuda", "torch sees no GPU here", "Set train.device=cpu or auto")
    return AutoPipeline(
        ranks=ranks,
        schedule=pipeline.schedule,
        microbatches=pipeline.microbatches,
        embedding_weight=pipeline.embedding_weight,
        head_weight=pipeline.head_weight,
        layout=pipeline.layout,
        layers_per_stage=pipeline.layers_per_stage,
        first_stage_layers=pipeline.first_stage_layers,
        last_stage_layers=pipeline.last_stage_layers,
        modules_per_stage=pipeline.modules_per_stage,
        seed=model.seed,
        dtype=getattr(torch, model.dtype),
        attention=model.attention,
        device="cpu" if section.device == "cpu" else None,
        timeout=pipeline.timeout_seconds,
        trace_folder=_traces(config, axes),
        activation_checkpointing=_checkpointing(config),
        replay_routing=config.train.replay_routing,
        shapes=make_padding(pipeline) or pipeline.shapes,
        transport=None if pipeline.transport == "auto" else pipeline.transport,
        exchange=pipeline.exchange,
        wire_dtype=None if pipeline.wire_dtype is None else getattr(torch, pipeline.wire_dtype),
        axes=None if axes == Axes() else axes,
        sharded=config.parallel.sharded,
        context=config.parallel.context,
        sequence_parallel=config.parallel.sequence_parallel,
    )


def _traces(config: TrainConfig, axes: Axes) -> Path:
    """Where the ranks of this pipeline leave their traces: those of another one have the same numbers."""
    folder = Path(config.output.folder).expanduser() / "stalled"
    return folder / f"pipeline-{pipeline_number(axes)}" if axes.ranks_per_stage > 1 else folder


def make_padding(section: PipelineSection) -> Padding | None:
    """What the pipeline does to a step's microbatches; None where it leaves them as they are."""
    if section.shapes != "padded":
        return None
    return Padding(**section.padding.model_dump()) if section.padding else Padding()


def _checkpointing(config: TrainConfig) -> bool | str | Checkpointing:
    given = config.train.activation_checkpointing
    if not isinstance(given, CheckpointingSection):
        return given
    limited = given.memory_limit is not None
    return Checkpointing(**given.model_dump(), shape=largest_microbatch(config) if limited else None)


def largest_microbatch(config: TrainConfig) -> tuple[int, int]:
    """Rows and sequence, with what the pipeline adds to them."""
    rows = -(-config.train.batch_size // (config.pipeline.microbatches * axes_of(config).batch_parts))
    padding, length = make_padding(config.pipeline), config.data.sequence_length
    return rows, padding.lengths(length).full if padding else length


def _check_output(output: Path) -> None:
    """Found now, and not when the first checkpoint is due."""
    standing = next(folder for folder in (output, *output.absolute().parents) if folder.exists())
    if not standing.is_dir() or not os.access(standing, os.W_OK | os.X_OK):
        rule = "nothing can be written there" if standing.is_dir() else f"{standing} is no folder"
        raise ConfigError(f"output.folder={output}", rule, "Name a folder that you may write")


def _check_model(config: TrainConfig, outline: BuildPlan) -> int:
    """The model's vocabulary.

    Raises ConfigError where a row has more positions than the model, and ModelError where documents are to be
    packed for a model that would mix them.
    """
    if config.data.packing in ("sequential", "best_fit"):
        refuse_packed(outline.source.model)
    model = outline.source.model.config
    longest = positions(model)
    if longest is not None and config.data.sequence_length > longest:
        raise ConfigError(
            f"data.sequence_length={config.data.sequence_length}",
            f"the model takes {longest} positions (max_position_embeddings)",
            f"Give {longest} or less, or a model with more",
        )
    padded = largest_microbatch(config)[1]
    if longest is not None and padded > longest:
        raise ConfigError(
            f"pipeline.padding, to {padded} tokens a row",
            f"the model takes {longest} positions (max_position_embeddings)",
            f"Give a multiple and buckets that keep rows at {longest} or less",
        )
    return int(model.get_text_config().vocab_size)


def _padding_note(config: TrainConfig, data: Data) -> tuple[str, ...]:
    """A line on the share of padding, where there can be any."""
    share = data.expected(config.train.steps).padding
    if config.data.packing == "stream" and share == 0:
        return ()
    shapes = config.pipeline.shapes
    return (
        f"padding {share:.1%} of the tokens (data.packing={config.data.packing}, pipeline.shapes={shapes})",
    )
