"""Pipelines that one rank builds otherwise than the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from penstock import AutoPipeline, Axes
from penstock.errors import PenstockError
from penstock.runtime.health import agreement as handshake
from support.families import tiny_config, tiny_model

OTHER: dict[str, dict[str, Any]] = {
    "microbatches": {"microbatches": 5},
    "schedule": {"schedule": "gpipe"},
    "placement": {"schedule": "interleaved_1f1b", "microbatches": 6},
    "dtype": {"dtype": torch.bfloat16},
    "model": {},
    "version": {},
}


ON_MESH: dict[str, dict[str, Any]] = {
    "learning": {"common": {"optimizer": {"lr": 0.1, "betas": [0.9, 0.95]}}},
    "microbatches": {"microbatches": 5},
    "stages": {"schedule": "interleaved_1f1b"},
    "ranks": {"ranks": 4, "axes": Axes()},
    "sizes": {"axes": Axes(dp_replicate=2)},
    "none": {"axes": None},
    "dtype": {"dtype": torch.float64},
    "seed": {"seed": 1},
    "split": {"layers_per_stage": [1, 3]},
    "entries": {"sharding": {"labels": 1}},
    "model": {},
}


def differ_on_mesh(whats: list[str], differing: int) -> list[str]:
    """The same of 2 x 2 processes, of which `differing` alone is another: by thing, the error in words."""
    said = []
    for what in whats:
        options: dict[str, Any] = {
            "ranks": 2, "schedule": "1f1b", "microbatches": 4, "dtype": torch.float32, "timeout": 20,
            "axes": Axes(dp_shard=2), "common": {"optimizer": {"lr": 0.2, "betas": [0.9, 0.95]}},
        }  # fmt: skip
        other = dist.get_rank() == differing
        size = 48 if what == "model" and other else 24
        auto = AutoPipeline(**{**options, **(ON_MESH[what] if other else {})})
        try:
            auto.build(tiny_config("llama", layers=4, intermediate_size=size))
            said.append("no error")
        except PenstockError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def other_values(parameter: str) -> str:
    """What 2 x 2 processes say of models of which that of process 2 has another value in one parameter."""
    model = tiny_model("llama", torch.float64, layers=4)
    if dist.get_rank() == 2:
        with torch.no_grad():
            model.get_parameter(parameter).view(-1)[1] += 1e-3
    auto = AutoPipeline(ranks=2, schedule="1f1b", microbatches=2, timeout=20, axes=Axes(dp_replicate=2))
    try:
        auto.build(model).close()
    except PenstockError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def other_copies(schedule: str, tied: bool = True) -> str:
    """What a pipeline says whose ranks were given models that each made by itself."""
    torch.manual_seed(dist.get_rank())
    model = AutoModelForCausalLM.from_config(tiny_config("llama", layers=2, tied=tied))
    auto = AutoPipeline(ranks=2, schedule=schedule, microbatches=4, timeout=20)
    try:
        auto.build(model).close()
    except PenstockError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def late() -> str:
    """What three of four processes are told where the last one never comes; it stays till they have been."""
    store, last = dist.distributed_c10d._get_default_store(), dist.get_world_size() - 1
    if dist.get_rank() == last:
        store.wait([f"said-{rank}" for rank in range(last)])
        return ""
    auto = AutoPipeline(ranks=2, schedule="1f1b", microbatches=4, timeout=1, axes=Axes(dp_shard=2))
    try:
        auto.build(tiny_config("llama", layers=2))
        return "no error"
    except PenstockError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        store.set(f"said-{dist.get_rank()}", "")


def differ(what: str) -> str:
    """The typed error that a pipeline of 3 ranks ends in where rank 1 differs in `what`, in words."""
    options: dict[str, Any] = {"schedule": "1f1b", "microbatches": 4, "dtype": torch.float32}
    size = 24
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            options |= OTHER[what]
            if what == "model":
                size = 48
            if what == "version":
                patch.setattr(handshake, "version", lambda name: "0.1.0")
        auto = AutoPipeline(ranks=3, timeout=10, **options)
        try:
            auto.build(tiny_config("llama", layers=6, intermediate_size=size))
        except PenstockError as error:
            return f"{type(error).__name__}: {error}"
    return "no error"
