"""Multiply-adds of layers, embedding and head, from a forward without values."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig

from penstock import AutoPipeline
from penstock.models.costs import multiply_adds
from penstock.models.partition import LayerCosts
from support.tiny import QWEN3

ATTENTION = 16 * 16 + 2 * 16 * 8 + 16 * 16 + 2 * 8 * 16  # four products, scores and values; for each token


def counted(keys: dict[str, Any], dtype: torch.dtype = torch.float32) -> LayerCosts | None:
    """Of 3 rows with 8 tokens, by the model whose config has these keys."""
    plan = AutoPipeline(ranks=1, microbatches=1, dtype=dtype).build_plan(AutoConfig.for_model(**keys))
    return multiply_adds(plan.source.model, plan.chain, (3, 8))


def test_a_layer_has_those_of_its_products_and_an_embedding_has_none() -> None:
    assert counted(QWEN3) == LayerCosts([24 * (ATTENTION + 3 * 16 * 32)] * 2, 0, 24 * 16 * 256)


def test_of_experts_those_count_that_a_token_chooses() -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    found = counted({**QWEN3, "model_type": "qwen3_moe", **experts}, torch.bfloat16)
    assert found is not None
    assert found.layers == [24 * (ATTENTION + 16 * 8 + 2 * 3 * 16 * 32)] * 2


def test_layers_of_several_kinds_count_as_their_own_kind_does() -> None:
    experts = {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "mlp_only_layers": [1],
    }
    found = counted({**QWEN3, "model_type": "qwen3_moe", **experts}, torch.bfloat16)
    assert found is not None
    assert found.layers[1] == 24 * (ATTENTION + 3 * 16 * 32)
    assert found.layers[0] != found.layers[1]
