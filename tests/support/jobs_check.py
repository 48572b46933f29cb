"""A run's check against the whole model, over real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from penstock import AutoPipeline, Axes
from penstock.errors import EquivalenceError
from penstock.train.check.split_beside_whole import check_split
from penstock.train.check.whole import Whole
from penstock.train.run import preflight
from support.families import tiny_config
from support.tiny import QWEN3, config


def checked(folder: str, schedule: str) -> list[str]:
    """What this rank is told: as built; with little memory on rank 0 alone; with rank 1 damaged."""
    here = Path(folder) / str(dist.get_rank())
    here.mkdir()
    made = config(here, {**QWEN3, "num_hidden_layers": 4, "tie_word_embeddings": True})
    ranks = dist.get_world_size()
    section = made.pipeline.model_copy(update={"ranks": ranks, "schedule": schedule, "microbatches": 4})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", str(dist.get_rank()))
        patch.setenv("WORLD_SIZE", str(ranks))
        prepared = preflight(made.model_copy(update={"pipeline": section}))
    pipe = prepared.auto.build(prepared.model)
    whole = Whole(prepared.outline.source, prepared.auto.seed, prepared.auto.loss())
    batch = prepared.data.batch(1).content
    told = [check_split(pipe, whole, batch, "auto")]
    told.append(check_split(pipe, whole, batch, "auto", lambda _: None if dist.get_rank() else 1000))
    if dist.get_rank() == 1:
        spoil(next(p for name, p in pipe.named_parameters() if name.endswith("q_proj.weight")))
    try:
        check_split(pipe, whole, batch, "auto")
    except EquivalenceError as error:
        told.append(str(error))
    pipe.close()
    return told


def deep(layers: int) -> str:
    """What a model in half precision is told whose products are shared out, in a pipeline of two."""
    torch.set_num_threads(1)
    config = tiny_config("llama", layers=layers)
    axes = Axes(tp=2)
    auto = AutoPipeline(ranks=2, microbatches=2, axes=axes, dtype=torch.bfloat16)
    pipe = auto.build(config)
    tokens = torch.randint(3, 64, (2, 48), generator=torch.Generator().manual_seed(1))
    whole = Whole(auto.outline(config).source, auto.seed, auto.loss(), axes=axes)
    told = check_split(pipe, whole, {"input_ids": tokens, "labels": tokens.clone()}, "auto")
    pipe.close()
    return told


@torch.no_grad()
def spoil(parameter: nn.Parameter) -> None:
    parameter[0, 0] += 1e-3
