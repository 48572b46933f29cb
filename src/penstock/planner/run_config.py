"""The config of `penstock train` that runs a plan as it was predicted.

Its data is made up, with rows as long as the plan's: put your own in its place.
"""

from __future__ import annotations

from typing import Any

from penstock.parallel.axes import Axes
from penstock.planner.candidate import GROUPS, Candidate


def run_config(candidate: Candidate, model: dict[str, Any]) -> dict[str, Any]:
    """The sections of a config. model: those keys of its section `model`

    candidate: with its split
    """
    tree: dict[str, Any] = {
        "model": model,
        "data": {
            "kind": "dummy",
            "dummy": {"documents": 4 * candidate.batch},
            "sequence_length": candidate.length,
        },
        "pipeline": _pipeline(candidate),
        "parallel": _parallel(candidate),
        "train": {"batch_size": candidate.batch, "precision": candidate.precision},
    }
    if candidate.recomputed != "none":
        tree["train"]["activation_checkpointing"] = _checkpointing(candidate)
    if candidate.offload_ahead:
        tree["train"]["activation_offloading"] = {"ahead": candidate.offload_ahead}
    if candidate.chunked_loss is not True:
        tree["train"]["chunked_loss"] = candidate.chunked_loss
    return {name: section for name, section in tree.items() if section}


def _pipeline(candidate: Candidate) -> dict[str, Any]:
    named = {"schedule": candidate.schedule, **dict(candidate.options)}
    section: dict[str, Any] = {
        "ranks": candidate.ranks,
        "schedule": named if candidate.options else candidate.schedule,
        "microbatches": candidate.microbatches,
    }
    if len(candidate.split) > 1:
        section["layers_per_stage"] = list(candidate.split)
    return section


def chosen_keys(candidate: Candidate) -> dict[str, dict[str, Any]]:
    """The keys of `run_config` that schedule, split and recomputation make, by section."""
    pipeline = _pipeline(candidate)
    keys: dict[str, Any] = {
        name: value for name, value in pipeline.items() if name in ("schedule", "layers_per_stage")
    }
    again = None if candidate.recomputed == "none" else _checkpointing(candidate)
    return {"pipeline": keys, "train": {"activation_checkpointing": again}}


def _parallel(candidate: Candidate) -> dict[str, Any]:
    axes, usual = candidate.axes.sizes, Axes().sizes
    section: dict[str, Any] = {name: size for name, size in axes.items() if size != usual[name]}
    if candidate.axes.cp > 1:
        section["context"] = candidate.context
    if candidate.sequence_parallel:
        section["sequence_parallel"] = True
    if candidate.reshard:
        section["reshard_after_forward"] = True
    return section


def _checkpointing(candidate: Candidate) -> str | dict[str, Any]:
    if candidate.in_flight is None:
        return candidate.recomputed
    counts = {"in_flight": list(candidate.in_flight)}
    return {"save": list(GROUPS), **counts} if candidate.recomputed == "selective" else counts
