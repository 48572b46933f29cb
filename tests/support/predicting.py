"""Tiny random models with prediction layers (MTP)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from penstock import with_mtp
from support import zoo


def tiny_config(model_type: str = "deepseek_v3", *, count: int = 1, **changes: Any) -> PretrainedConfig:
    """Of four layers and `count` prediction layers."""
    config = zoo.tiny_config(model_type, **changes)
    config.num_nextn_predict_layers = count
    return config


def tiny_predicting(
    model_type: str = "deepseek_v3", dtype: torch.dtype = torch.float64, **changes: Any
) -> PreTrainedModel:
    torch.manual_seed(0)
    made = with_mtp(zoo.class_of(model_type))
    model: PreTrainedModel = made._from_config(
        tiny_config(model_type, **changes), experts_implementation="eager"
    )
    zoo.unsettle(model, 0)
    return model.to(dtype).train()


def packed_batch(rows: int = 4) -> dict[str, Tensor]:
    """Rows of three documents each, whose first tokens have no label."""
    lengths = (5, 3, 4)
    batch = zoo.tiny_batch("deepseek_v3", rows, sum(lengths))
    positions = torch.cat([torch.arange(length) for length in lengths])
    batch["labels"][:, positions == 0] = -100
    return {**batch, "position_ids": positions.expand(rows, -1).contiguous()}
