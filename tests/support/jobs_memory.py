"""Runs with in-memory checkpoints, each worker of the pool one process, on several hosts as it seems."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch.distributed as dist

from penstock.errors import RunError
from penstock.train import loop
from support.jobs_train import trained


# _step: a run is lost in a chosen step
def lost(patch: pytest.MonkeyPatch, step: int | None) -> None:
    """The run ends before this step, as it does where another process is lost."""
    original = loop._step

    def failing(run: Any, number: int, *arguments: Any) -> Any:
        if number == step:
            raise RunError(f"step {step}", "a process was lost", "Start it again")
        return original(run, number, *arguments)

    patch.setattr(loop, "_step", failing)


def remembered(
    tree: dict[str, Any], memories: list[str], fails_at: int | None = None, resume: str | None = None
) -> tuple[str, str]:
    """What a rank says, and the error. memories: the folder in the memory of each rank's host"""
    memory = memories[dist.get_rank()]
    os.makedirs(memory, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PENSTOCK_MEMORY", memory)
        lost(patch, fails_at)
        ended = trained(tree, resume=resume)
    return ended["said"], ended["error"]
