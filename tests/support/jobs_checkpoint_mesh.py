"""Checkpoints on a mesh, where one pipeline writes and all of them read."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.optim import Optimizer

from penstock import Axes, Pipeline
from penstock.checkpoint.save_load import CheckpointWriter, load_checkpoint, save_checkpoint
from penstock.runtime.sharded_weights import local_shard
from support.jobs_checkpoint import error_of, make


def side_by_side() -> tuple[Pipeline, list[Optimizer]]:
    """A mesh of two pipelines, whose optimizers hold something."""
    pipe, optimizers = make(dist.get_world_size() // 2, "1f1b", axes=Axes(dp_shard=2))
    for parameter in pipe.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for optimizer in optimizers:
        optimizer.step()
    return pipe, optimizers


def failure_raised_once(path: str) -> str:
    """The error of a write that failed. There is nothing to wait for then, and the next write is fresh."""
    pipe, optimizers = side_by_side()
    writer = CheckpointWriter(pipe)

    def then() -> None:
        raise OSError("no room")

    writer.save(path, optimizers, then=then)
    error = error_of(writer.wait)
    writer.wait()
    writer.save(path, optimizers)
    writer.wait()
    pipe.close()
    return error


def torn_on_one(path: str, what: str) -> tuple[str, bool]:
    """Each rank reads a copy of its own, and rank 1's is torn. Whether the weights stayed as they were."""
    pipe, optimizers = side_by_side()
    save_checkpoint(f"{path}/0", pipe, optimizers, {"step": 1})
    folder = Path(path) / str(dist.get_rank())
    if dist.get_rank() == 1:
        shutil.copytree(f"{path}/0", folder)
        (folder / "state.json").write_text("{" if what != "weights" else "{}")
        if what != "manifest":
            (folder / "manifest.json").write_text('{"files": {}}')
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        for parameter in pipe.parameters():
            parameter.zero_()
        if what == "weights" and dist.get_rank() == 1:
            patch.setattr(pipe, "load_weights", lambda _: (folder / "none").read_bytes())
        error = error_of(lambda: load_checkpoint(folder, pipe, optimizers))
        same = not any(bool(local_shard(parameter).any()) for parameter in pipe.parameters())
    pipe.close()
    return error, same


def not_to_be_kept_on_one(path: str, rank: int, what: str) -> str:
    """What one rank alone has to keep cannot be kept."""
    pipe, optimizers = side_by_side()
    state = None
    if dist.get_rank() == rank and what == "state":
        state = {"x": torch.ones(1)}
    elif dist.get_rank() == rank:
        optimizers[0].state[list(pipe.parameters())[1]]["odd"] = object()
    error = error_of(lambda: save_checkpoint(path, pipe, optimizers, state))
    pipe.close()
    return error


def random_numbers(path: str) -> tuple[list[float], list[float]]:
    """What each rank, seeded by itself, draws after it saved, and after it went on from there."""
    pipe, optimizers = side_by_side()
    torch.manual_seed(dist.get_rank())
    save_checkpoint(path, pipe, optimizers)
    drawn = torch.rand(3).tolist()
    load_checkpoint(path, pipe, optimizers)
    again = torch.rand(3).tolist()
    pipe.close()
    return drawn, again
