"""How many processes a run takes, and how many of them each axis has."""

from __future__ import annotations

import os

import torch.distributed as dist

from penstock.errors import ConfigError, WorldSizeError
from penstock.launch.start import under_torchrun
from penstock.parallel.mesh import MESH, Axes
from penstock.train.config.sections import TrainConfig, too_few_rows


def started() -> int | None:
    """How many processes there are; None for a process that was started alone."""
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ["WORLD_SIZE"]) if under_torchrun() else None


def ranks_of(config: TrainConfig) -> int:
    """The pipeline's ranks, without -1. Raises ConfigError, WorldSizeError where processes do not tell."""
    ranks, world = config.pipeline.ranks, started()
    if ranks != -1:
        return ranks
    if world is None:
        raise _not_started("pipeline.ranks")
    return config.parallel.axes.pipeline_ranks(world)


def axes_of(config: TrainConfig) -> Axes:
    """The axes beside the pipeline's, without -1.

    Raises WorldSizeError where another number of processes was started; ConfigError for -1 where none was,
    and for a batch with too few rows.
    """
    ranks, axes, world = ranks_of(config), config.parallel.axes, started()
    if world is None:
        _check_sizes_given(axes)
        world = ranks * axes.ranks_per_stage
    if axes == Axes() and world != ranks:
        raise WorldSizeError(
            f"pipeline.ranks={ranks}",
            f"each rank is one process and torchrun started {world}",
            f"Start it with {ranks} processes, or set pipeline.ranks={world}",
        )
    full = axes.resolve(ranks, world)
    if few := too_few_rows(config.train.batch_size, config.pipeline.microbatches, full.batch_parts):
        rule, remedy = few
        value, _, rest = rule.partition(" rows ")
        raise ConfigError(value, f"its rows {rest}", remedy[0].upper() + remedy[1:])
    return full


def processes(config: TrainConfig) -> int:
    """How many a run takes. Raises what `axes_of` raises."""
    return ranks_of(config) * axes_of(config).ranks_per_stage


def pipeline_number(axes: Axes) -> int:
    """Which of the mesh's pipelines this process is in, from 0: `pp` is the outermost axis."""
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
    return rank % axes.ranks_per_stage


def is_first() -> bool:
    """Whether this process writes what is written once."""
    return not dist.is_initialized() or dist.get_rank() == 0


def check_not_alone(axes: Axes) -> None:
    """Raises WorldSizeError for a process that would be all of a mesh."""
    if axes.ranks_per_stage > 1 and started() is None:
        raise WorldSizeError(
            f"parallel {axes} in one process",
            "only the pipeline's ranks may share a process",
            "Start it with penstock train or torchrun, or set every axis of parallel to 1",
        )


def _check_sizes_given(axes: Axes) -> None:
    sizes = axes.sizes
    for name in MESH[1:]:
        if sizes[name] == -1:
            raise _not_started(f"parallel.{name}")


def _not_started(name: str) -> ConfigError:
    return ConfigError(
        f"{name}=-1",
        "it takes the processes that are left, and penstock train starts as many as the sizes say",
        "Give a number, or start the processes yourself: torchrun --nproc-per-node 8 -m penstock train ...",
    )
