"""From the config to the library: the number of processes of a run, and its AutoPipeline."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from penstock.batch.liger import check_liger
from penstock.batch.loss import Loss, NextToken, rows_per_group
from penstock.batch.padding import Padding
from penstock.errors import ConfigError, WorldSizeError
from penstock.launch.stop import under_torchrun
from penstock.models.activation_checkpointing import Checkpointing
from penstock.models.activation_offloading import Offloading
from penstock.options import (
    LayerOptions,
    MeshOptions,
    ModelOptions,
    RoutingOptions,
    RunOptions,
    SplitOptions,
)
from penstock.parallel.axes import MESH, Axes
from penstock.pipeline.auto_pipeline import AutoPipeline
from penstock.pipeline.building.compiling import Compile, check_compiler
from penstock.pipeline.building.experts import check_name, needs_gpu
from penstock.train.config.data import LabelsOf
from penstock.train.config.model import PipelineSection
from penstock.train.config.sections import TrainConfig, check_rows
from penstock.train.config.values import PaddingSection, Section
from penstock.train.model import has_hub_weights
from penstock.train.optimizers.optimizer import check_installed
from penstock.train.sizes import StepSizes

T = TypeVar("T")


def started() -> int | None:
    """The number of processes; None for a process that was started alone."""
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ["WORLD_SIZE"]) if under_torchrun() else None


def ranks_of(config: TrainConfig, world: int | None = None) -> int:
    """The pipeline's ranks, without -1, in a world of `world` processes, or of those that were started.

    Raises ConfigError, WorldSizeError.
    """
    ranks, world = config.pipeline.ranks, world or started()
    if ranks != -1:
        return ranks
    if world is None:
        raise _not_started("pipeline.ranks")
    return config.parallel.axes.pipeline_ranks(world)


def axes_of(config: TrainConfig, world: int | None = None) -> Axes:
    """The mesh's axes other than the pipeline's, without -1, as `ranks_of`.

    Raises WorldSizeError if another number of processes was started; ConfigError for -1 if none was, and
    for a batch with too few rows.
    """
    ranks, axes, world = ranks_of(config, world), config.parallel.axes, world or started()
    if world is None:
        for name in MESH[1:]:
            if axes.sizes[name] == -1:
                raise _not_started(f"parallel.{name}")
        world = ranks * axes.ranks_per_stage
    if axes == Axes() and world != ranks:
        rule = f"each rank is one process, and the world has {world}"
        remedy = f"Start it with {ranks} processes, or set pipeline.ranks={world}"
        raise WorldSizeError(f"pipeline.ranks={ranks}", rule, remedy)
    full, train = axes.resolve(ranks, world), config.train
    check_rows(train.batch_size, config.pipeline.microbatches, full.batch_parts, train.accumulate)
    _check_ramp(config, full)
    return full


def mesh_of(config: TrainConfig) -> dict[str, int]:
    """The size of each axis of the mesh, `pp` included. Raises what `axes_of` raises."""
    return {"pp": ranks_of(config), **axes_of(config).sizes}


def _check_ramp(config: TrainConfig, axes: Axes) -> None:
    """Raise ConfigError for a phase of the ramp whose size the axes, without -1, do not divide."""
    shared = 2 * axes.cp if axes.cp > 1 else 1
    shared *= axes.tp if config.parallel.sequence_parallel else 1
    for phase in config.train.ramp:
        for name, size, parts in (
            ("batch_size", phase.batch_size, axes.batch_parts),
            ("sequence_length", phase.sequence_length, shared),
        ):
            if size is not None and size % parts:
                rule = f"with {axes} it is divided into {parts} equal parts"
                remedy = f"Give a multiple of {parts}"
                raise ConfigError(f"train.ramp with {name}={size}", rule, remedy)


def sizes_of(config: TrainConfig) -> StepSizes:
    """The size of each step. Raises what `axes_of` raises."""
    return StepSizes.of(config, axes_of(config).batch_parts)


def for_world(config: TrainConfig, world: int | None) -> TrainConfig:
    """The config with each -1 replaced by its number. Raises what `axes_of` raises."""
    pipeline = config.pipeline.model_copy(update={"ranks": ranks_of(config, world)})
    parallel = config.parallel.model_copy(update=axes_of(config, world).sizes)
    return config.model_copy(update={"pipeline": pipeline, "parallel": parallel})


def _not_started(name: str) -> ConfigError:
    return ConfigError(
        f"{name}=-1",
        "it takes the processes that are left, and penstock train starts as many as the sizes say",
        "Give a number, or start the processes yourself: torchrun --nproc-per-node 8 -m penstock train ...; "
        "for a dry run give --world 8",
    )


def own_number() -> int:
    """The number of this process among those of the run, from 0."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def is_first() -> bool:
    """Whether this process is the one that writes the files of the run."""
    return own_number() == 0


def check_machine(config: TrainConfig) -> None:
    """Raise ConfigError if the config needs a GPU or a package that this machine lacks."""
    check_installed(config.optimizer)
    on_cpu = config.train.device == "cpu" or not torch.cuda.is_available()
    _check_experts(config, on_cpu)
    if (how := _made(Compile, config.train.compile)) is not None:
        check_compiler(how, torch.device("cpu" if on_cpu else "cuda"))
    if config.train.chunked_loss == "liger":
        check_liger("train.chunked_loss=liger", "cpu" if on_cpu else "cuda")
    if torch.cuda.is_available():
        return
    if config.pipeline.transport == "nccl":
        rule = "it moves GPU memory, and torch sees no GPU"
        raise ConfigError("pipeline.transport=nccl", rule, "Take gloo")
    if config.train.device == "cuda":
        raise ConfigError("train.device=cuda", "torch sees no GPU here", "Set train.device=cpu or auto")


def _check_experts(config: TrainConfig, on_cpu: bool) -> None:
    """Raise ConfigError for experts that transformers does not know, or that need a GPU."""
    name = config.model.experts
    if name is None:
        return
    check_name(name)
    if needs_gpu(name) and on_cpu:
        rule = "these are kernels for GPUs, and the run is on CPUs"
        raise ConfigError(f"model.experts={name}", rule, "Take grouped_mm, batched_mm or eager")


def make_auto(config: TrainConfig) -> AutoPipeline:
    """The AutoPipeline that the config describes. Raises ConfigError, WorldSizeError."""
    pipeline, model, parallel, axes = config.pipeline, config.model, config.parallel, axes_of(config)
    ranks = ranks_of(config)
    if pipeline.transport == "local" and (count := ranks * axes.ranks_per_stage) > 1:
        rule = f"it holds all ranks in one process, and {count} would be started"
        raise ConfigError("pipeline.transport=local", rule, "Leave it out, or set pipeline.ranks=1")
    return AutoPipeline(
        **_shared(pipeline, RunOptions, SplitOptions)
        | _shared(model, ModelOptions)
        | _shared(config.train, RoutingOptions, LayerOptions)
        | _shared(parallel, MeshOptions)
        | {
            "ranks": ranks,
            "dtype": _dtype(model.dtype),
            "revision": model.commit if has_hub_weights(model) else None,
            "transport": None if pipeline.transport == "auto" else pipeline.transport,
            "wire_dtype": _dtype(pipeline.wire_dtype),
            "shapes": make_padding(pipeline) or pipeline.shapes,
            "activation_checkpointing": _checkpointing(config),
            "activation_offloading": _made(Offloading, config.train.activation_offloading),
            "compile": _made(Compile, config.train.compile) or False,
        },
        loss_fn=_loss_of(config),
        sequence_length=config.data.longest_document,  # attention stays within a document
        image_tokens=0 if config.data.images is None else None,
        autocast=torch.bfloat16 if config.train.precision == "mixed" else None,
        adapter=None if config.adapter is None else config.adapter.lora_config(_task(config)),
        quantize=None if config.adapter is None else config.adapter.quantize,
        device="cpu" if config.train.device == "cpu" else None,
        timeout=pipeline.timeout_seconds,
        trace_folder=trace_folder(config, axes),
        axes=None if axes == Axes() else axes,
        sharded=parallel.sharded,
    )


# of heads, by PEFT: with one of rows or tokens, it trains the whole head, and saves it with the adapter
_TASKS: dict[LabelsOf, str | None] = {
    "next tokens": "CAUSAL_LM", "rows": "SEQ_CLS", "tokens": "TOKEN_CLS", "masked tokens": None
}  # fmt: skip


def _task(config: TrainConfig) -> str | None:
    head = None if config.train.loss is None else config.train.loss.head
    return _TASKS["rows" if head is not None else config.data.labels]


def _loss_of(config: TrainConfig) -> Loss | None:
    """None for labels of the model's own head, whose loss is the model's own."""
    section = config.train
    if config.data.labels != "next tokens":
        return None
    return (
        NextToken(section.label_smoothing, section.z_loss, accuracy=True)
        if section.loss is None
        else section.loss.make()
    )


def _shared(section: Section, *groups: type) -> dict[str, Any]:
    """The values of the options that a section shares with AutoPipeline."""
    return {option.name: getattr(section, option.name) for group in groups for option in fields(group)}


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)


def _made(make: Callable[..., T], section: Section | None, **more: object) -> T | None:
    """The library's object with the keys of a section; None for a section that is off."""
    return None if section is None else make(**section.model_dump(), **more)


def trace_folder(config: TrainConfig, axes: Axes) -> Path:
    """Where ranks write their traces: one folder a pipeline, as all pipelines number their ranks from 0."""
    folder = config.output.path / "stalled"
    if axes.ranks_per_stage == 1:
        return folder
    return folder / f"pipeline-{own_number() % axes.ranks_per_stage}"  # `pp` is the outermost axis


def make_padding(section: PipelineSection) -> Padding | None:
    """How the pipeline pads a step's microbatches; None if it does not."""
    return _made(Padding, section.padding or PaddingSection()) if section.shapes == "padded" else None


def _checkpointing(config: TrainConfig) -> Checkpointing | None:
    section = config.train.activation_checkpointing
    limited = section is not None and section.memory_limit is not None
    return _made(Checkpointing, section, shape=largest_microbatch(config) if limited else None)


def largest_microbatch(config: TrainConfig) -> tuple[int, int]:
    """Rows, and tokens a row, of the largest microbatch, with padding."""
    parts = axes_of(config).batch_parts
    rows = -(-config.train.batch_size // (config.pipeline.microbatches * config.train.accumulate * parts))
    rows *= rows_per_group(_loss_of(config))
    padding, length = make_padding(config.pipeline), config.data.sequence_length
    return rows, padding.lengths(length).full if padding else length
