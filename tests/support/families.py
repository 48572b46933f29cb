"""Tiny random models of every family that must be exact, and pipelines of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from penstock import AutoPipeline, Pipeline

# what each family's config needs beyond the sizes below; windows are shorter than the test's sequences
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "mistral": {"sliding_window": 4},
    "mixtral": {"num_local_experts": 4},
    "gemma": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "sliding_window": 4},
    "gemma3_text": {"head_dim": 8, "sliding_window": 4},
    "phi3": {"pad_token_id": 0},
    "gpt2": {},
    "gpt_neox": {},
    # its ReLU has a kink: in float32 a sum of another order may fall on the other side of it
    "opt": {"word_embed_proj_dim": 32, "activation_function": "gelu"},
    "olmo2": {},
    "granite": {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5},
    "cohere2": {"sliding_window": 4},
    "gpt_oss": {"num_local_experts": 4, "head_dim": 8, "sliding_window": 4},
}

# these compute norms, and the norm weights' gradients, in float32 whatever the model's dtype
FLOAT32_INSIDE = {"gemma", "gemma2", "gemma3_text", "cohere2", "gpt_oss"}


def tiny_config(family: str, *, layers: int = 4, tied: bool = False, **changes: Any) -> PretrainedConfig:
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    # nothing random: the comparison is of gradients in training mode
    quiet = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "dropout": 0.0,
             "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}  # fmt: skip
    options = {**sizes, **quiet, **FAMILIES[family], "tie_word_embeddings": tied, **changes}
    return AutoConfig.for_model(family, **options)


def tiny_model(
    family: str, dtype: torch.dtype = torch.float32, *, seed: int = 0, **changes: Any
) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = tiny_config(family, **changes)
    # the grouped product of the default experts takes no float64
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    return model.to(dtype).train()


def pipeline(model: PreTrainedModel, **options: Any) -> Pipeline:
    return AutoPipeline(**{"ranks": 2, "microbatches": 4, **options}).build(model)


def each_layer(stage: nn.Module) -> Iterator[nn.Module]:
    """The layers of a llama."""
    yield from (module for module in stage.modules() if type(module).__name__ == "LlamaDecoderLayer")


def ragged_batch(rows: int = 8, length: int = 10) -> dict[str, Tensor]:
    """Rows whose valid tokens differ much in number, one with a single one."""
    generator = torch.Generator().manual_seed(rows * 1000 + length)
    ids = torch.randint(3, 64, (rows, length), generator=generator)
    labels = ids.clone()
    labels[0, 2:] = -100
    labels[rows // 2, : length // 2] = -100
    labels[-1, 3] = -100
    return {"input_ids": ids, "labels": labels}
