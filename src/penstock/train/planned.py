"""`pipeline.schedule: planned`: the planner chooses schedule, split and recomputation when the run starts.

    config                      the mesh, the microbatches and their rows stay
    device at hand, --cluster   what they take and hold
    result                      the same config with the chosen keys written out, as if the user had

The result depends on the config and the cluster alone, so every rank chooses the same; the ranks' handshake
compares configs and schedules all the same. A resumed run takes what its checkpoint's config says, as long as
its mesh and microbatches are those of the checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, NamedTuple

import torch

from penstock.errors import ConfigError
from penstock.models.source import sdpa_for_flash
from penstock.options import SplitOptions
from penstock.planner.at_hand import cluster_at_hand
from penstock.planner.candidate import Candidate, Precision
from penstock.planner.hardware import Cluster
from penstock.planner.one_mesh import plan_mesh
from penstock.planner.run_config import chosen_keys
from penstock.planner.search import memory_limit
from penstock.planner.workload import Workload
from penstock.schedule.choose import build
from penstock.train.checkpoints import recorded_state
from penstock.train.config.model import PLANNED
from penstock.train.config.sections import TrainConfig
from penstock.train.model import config_in
from penstock.train.settings import axes_of, largest_microbatch, mesh_of, ranks_of, sizes_of

_PIPELINE = ("schedule", "balance", *(option.name for option in fields(SplitOptions)))
_CHECKPOINTING = "activation_checkpointing"
_PRECISIONS: dict[tuple[str | None, str], Precision] = {
    ("mixed", "float32"): "mixed",
    ("bfloat16", "bfloat16"): "bfloat16",
    (None, "bfloat16"): "bfloat16",
    ("float32", "float32"): "float32",
    (None, "float32"): "float32",
}  # by train.precision and model.dtype


class Choice(NamedTuple):
    """A config without `planned`, and a line on what was taken; empty where nothing was to choose."""

    config: TrainConfig
    line: str = ""


def chosen(config: TrainConfig, resume: str | None, cluster: Cluster | None = None) -> Choice:
    """Choose what `pipeline.schedule: planned` leaves open. No weight is read, and nothing is communicated.

    Args:
        resume: as for `preflight`
        cluster: whose devices the run has; None takes devices like the one at hand

    Raises ConfigError, WorldSizeError, ModelError, CheckpointError, HubError.
    """
    if config.pipeline.schedule != PLANNED:
        return Choice(config)
    _check(config)
    if (before := _recorded(config, resume)) is not None:
        return Choice(_with(config, before), "planned: schedule, split and recomputation of the checkpoint")
    mesh, on_cpu = _mesh(config), config.train.device == "cpu" or not torch.cuda.is_available()
    cluster = cluster or cluster_at_hand(on_cpu, mesh.devices)
    model = Workload(config_in(config.model), mesh.precision, config.model.attention)
    with sdpa_for_flash():
        best = plan_mesh(model, mesh, cluster, memory_limit(cluster, None), _accepts(config))
    run = best.candidate
    line = (
        f"planned: {run.label}, layers {run.split_in_words}, recomputed {run.recomputation}: "
        f"{best.seconds:.3g} s a step and {best.nbytes / 2**30:.2f} GiB predicted on {cluster.device.name}"
    )
    return Choice(_with(config, chosen_keys(run)), line)


def as_overrides(config: TrainConfig) -> list[str]:
    """Arguments of the command that give a rank the choice of `config`."""
    values = config.model_dump(mode="json")
    keys = [("pipeline", name) for name in _PIPELINE] + [("train", _CHECKPOINTING)]
    return [
        f"{section}.{name}={json.dumps(values[section][name])}"
        for section, name in keys
        if values[section][name] is not None
    ]


def _check(config: TrainConfig) -> None:
    """Raise ConfigError for keys that choose what the planner chooses, and for what it cannot predict."""
    for value, rule, remedy in _wrong(config):
        raise ConfigError(f"pipeline.schedule={PLANNED} with {value}", rule, remedy)


def _wrong(config: TrainConfig) -> Iterator[tuple[str, str, str]]:
    for name in _PIPELINE[1:]:
        if (value := getattr(config.pipeline, name)) is not None:
            yield f"pipeline.{name}={value}", "the planner splits the layers", "Leave one of the two out"
    if config.train.activation_checkpointing is not None:
        rule = "the planner chooses what is recomputed"
        yield f"train.{_CHECKPOINTING}", rule, "Leave one of the two out"
    unknown = "its predictions are of models whose weights are all trained, on text"
    for value, is_set in (
        ("adapter", config.adapter is not None),
        ("data.images", config.data.images is not None),
        ("model.mtp_loss_scaling_factor", config.model.mtp_loss_scaling_factor is not None),
    ):
        if is_set:
            yield value, unknown, "Name a schedule, such as 1f1b"
    if config.train.activation_offloading is not None:
        rule = "the planner keeps activations on the device, or recomputes them"
        yield "train.activation_offloading", rule, "Leave it out, or name a schedule, such as 1f1b"
    if _precision(config) is None:
        rule = f"its predictions are of {', '.join(dict.fromkeys(_PRECISIONS.values()))}"
        yield f"products in {config.computed}", rule, "Set train.precision, or name a schedule"


def _precision(config: TrainConfig) -> Precision | None:
    if config.parallel.param_dtype is not None:
        return None
    return _PRECISIONS.get((config.train.precision, config.model.dtype))


def _mesh(config: TrainConfig) -> Candidate:
    """The candidate that the config fixes, whose schedule, split and recomputation are open."""
    (rows, length), parallel, precision = largest_microbatch(config), config.parallel, _precision(config)
    assert precision is not None  # which `_check` has seen
    return Candidate(
        ranks_of(config),
        axes_of(config),
        rows=rows,
        length=length,
        microbatches=config.pipeline.microbatches,
        precision=precision,
        context=parallel.context,
        sequence_parallel=parallel.sequence_parallel,
        reshard=parallel.reshard_after_forward,
        chunked_loss=config.train.chunked_loss,
    )


def _accepts(config: TrainConfig) -> Any:
    """A function from a run to whether its schedule exists for the smaller steps of a ramp, too."""
    counts = {count for _, size in sizes_of(config).phases for count in size.calls}

    def accepts(run: Candidate) -> bool:
        try:
            for count in counts:
                build(run.schedule, ranks=run.ranks, microbatches=count, **dict(run.options))
        except ConfigError:
            return False
        return True

    return accepts


def _recorded(config: TrainConfig, resume: str | None) -> dict[str, dict[str, Any]] | None:
    """The choice in the checkpoint to go on from, if that has the same mesh and microbatches; else None."""
    state = recorded_state(config.output.path, resume)
    if state is None or state.mesh != mesh_of(config):
        return None
    pipeline, train = (state.config.get(name, {}) for name in ("pipeline", "train"))
    if pipeline.get("microbatches") != config.pipeline.microbatches or "schedule" not in pipeline:
        return None
    keys = {name: pipeline[name] for name in _PIPELINE if name in pipeline}
    return {"pipeline": keys, "train": {_CHECKPOINTING: train.get(_CHECKPOINTING)}}


def _with(config: TrainConfig, keys: dict[str, dict[str, Any]]) -> TrainConfig:
    """The config with these keys of its sections, checked as those of a file are."""
    sections = {name: getattr(config, name) for name in keys}
    changed = {
        name: type(section).model_validate(section.model_dump(mode="json") | keys[name])
        for name, section in sections.items()
    }
    return config.model_copy(update=changed)
