"""Pipelines on a mesh of several axes, run by the pool's workers."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock import AutoPipeline, Axes, Sharded
from support.families import tiny_model
from support.ragged import tokens
from support.reference import plain_step

ROWS, LENGTH = 8, 12


def batch(rows: int = ROWS, length: int = LENGTH) -> dict[str, Tensor]:
    """With labels so unevenly left out that each part of the batch counts for another number of items."""
    ids, labels = tokens(rows, length, 1), tokens(rows, length, 2)
    for row in range(rows):
        labels[row, : row % length] = -100
    return {"input_ids": ids, "labels": labels}


def own_part(whole: dict[str, Tensor], index: int, parts: int) -> dict[str, Tensor]:
    return {name: value.chunk(parts)[index] for name, value in whole.items()}


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def data_parallel(
    family: str, ranks: int, axes: Axes, schedule: Any, sharded: Sharded, options: dict[str, Any]
) -> dict[str, Any]:
    """Two steps, the second without clearing: loss and gradients beside the whole model's."""
    torch.set_num_threads(1)
    tied = options.pop("tied", False)
    model = tiny_model(family, torch.float64, layers=4, tied=tied)
    whole = batch()
    loss, expected = plain_step(model, whole)
    pipe = AutoPipeline(
        ranks=ranks, schedule=schedule, microbatches=2, timeout=30, axes=axes, sharded=sharded, **options
    ).build(model)
    mine = own_part(whole, *pipe.batch_part)
    evaluated = pipe.evaluate(mine)
    steps = [pipe.step(mine) for _ in range(2)]
    worst = 0.0
    named = dict(pipe.named_parameters(remove_duplicate=False))
    for name, parameter in named.items():
        assert parameter.grad is not None, name
        found = full(parameter.grad) / 2
        size = float(expected[name].abs().max())
        worst = max(worst, float((found - expected[name]).abs().max()) / max(size, 1e-300))
    norm = pipe.clip_grad_norm_(1e9)
    pipe.close()
    return {
        "loss": [step.loss for step in steps], "expected": loss, "worst": worst, "names": sorted(named),
        "norm": norm, "tokens": steps[0].tokens, "evaluated": evaluated.loss, "rank": dist.get_rank(),
    }  # fmt: skip
