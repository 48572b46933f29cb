"""Tiny models with a plan for tensor parallelism."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from transformers import PreTrainedModel

from support.families import FAMILIES, tiny_model

SINKS = {f"model.layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"} | {
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.self_attn.sinks": "colwise",
    "model.layers.*.self_attn": "local_params",
}
# other types than those of families.py, each for a style or a part that those lack
OTHERS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
        "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
        "first_k_dense_replace": 1, "moe_intermediate_size": 16, "num_key_value_heads": 4, "head_dim": 4,
    },
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24},
}  # fmt: skip


def build(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """A tiny model, whose norms and biases are no ones and zeros: those would hide much."""
    plan = changes.pop("plan", None)
    with mock.patch.dict(FAMILIES, OTHERS):
        model = tiny_model(family, dtype, **{"layers": 2, **changes})
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator).to(dtype)
    if plan is not None:
        model.tp_plan = plan
    return model
