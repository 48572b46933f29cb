"""A tiny random model of every family that transformers can make a causal language model of.

The configs are found by rule: a family's own default config is taken field by field, and what its name
says is a size is made small. `OWN` holds what a family needs beyond the rules.
"""

from __future__ import annotations

import re
from copy import deepcopy
from dataclasses import fields
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    SiglipVisionConfig,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

TYPES: tuple[str, ...] = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)

VOCABULARY = 64
FIRST_PLAIN_TOKEN = 3  # special tokens are all below it

# the number of layers of the part that is cut into stages, under each of its names
DEPTH = re.compile(r"num_hidden_layers|n_layers?|num_layers|(num_)?(en|de)coder_layers|num_blocks")

# the number of experts for each token; with a single one, a normalised router has no gradient
TOP_K = re.compile(r"num_experts_per_tok|moe_top_?k|moe_k|top_k_experts")

# the most that a field of this name may be; the first pattern that fits the whole name counts
LIMITS: tuple[tuple[str, int], ...] = (
    (r"num_mtp_layers|num_nextn_predict_layers|depth", 1),
    (r"(.*_)?vocab_size(_.*)?|encoder_hash_byte_group_vocab", VOCABULARY),
    (r".*shared_experts?", 1),
    (r"(.*_)?(num_|n_)?(\w+_)?experts|zero_expert_num", 4),
    (r"n_group|n_groups|o_groups|num_expert_groups|mamba_ngroups|mamba_n_groups", 2),
    (r"topk_group", 1),
    (r"(.*_)?num_(kv|key_value|key)_heads|n_kv_heads", 2),
    (r"(.*_)?heads|n_head", 4),
    (r"index_topk|index_topk_blocks|index_block_size|indexer_budget", 4),
    (r"mamba_d_head|mamba_headdim|mamba_head_dim", 16),  # 4 heads of the inner size, twice the hidden one
    (r"(.*_)?(head_dim|dim_head|d_head|head_size|kv_channels)|rotary_dim|index_head_dim", 8),
    (r"(.*_)?rank|\w*_lora_\w*|hc_lowrank|d_rel", 8),
    (r"(.*_)?(state_size|d_state)", 8),
    (r"(.*_)?(sliding_window(_size)?|attention_window_size|window_size|window_len)", 4),
    (r"local_attention", 8),  # twice the window
    (r"attention_chunk_size|(mamba_)?chunk_size|block_size|\w*attn_chunk_length|keep_window_size", 4),
    (r"(\w*_)?max_position_embeddings|n_positions|n_ctx|max_seq_len|context_length|max_\w+_positions", 64),
    (r"(.*_)?(intermediate_size|ffn_dim|ffn_hidden_size)(_.*)?|n_inner|mlp_dim|dff|dim_ff|d_inner", 48),
    (r"feed_forward_size|mamba_d_ssm", 64),
    (r"output_channels|nemo_conv_channels|\w+_out_channel", 16),
    (r"(.*_)?(hidden_size|embed_dim|embedding_size)(_.*)?|n_embd|d_model|emb_dim|lru_width|adapter_\w+", 32),
)

# the special tokens, all inside the vocabulary and below the plain ones
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

# sizes that some families leave open, and then cannot do without
OPEN = {"head_dim": 8, "num_key_value_heads": 2, "num_experts_per_tok": 2, "n_routed_experts": 4,
        "n_shared_experts": 1}  # fmt: skip

# the kinds of layers where the family's default config has one kind only, or not all
KINDS: dict[str, tuple[str, ...]] = {
    "cohere_compass_text": ("sliding_attention", "full_attention"),
    "dots1": ("sliding_attention", "full_attention"),
    "deepseek_v4": ("heavily_compressed_attention", "compressed_sparse_attention", "sliding_attention"),
    "granitemoehybrid": ("linear_attention", "full_attention"),
    "laguna": ("sliding_attention", "full_attention"),
    "lfm2": ("conv", "full_attention"),
    "lfm2_moe": ("conv", "full_attention"),
    "mellum": ("sliding_attention", "full_attention"),
    "ministral": ("sliding_attention", "full_attention"),
    "minimax_m3_vl_text": ("full_attention", "minimax_m3_sparse"),
    "zaya": ("hybrid", "hybrid_sliding"),
}

GEMMA4 = {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "global_head_dim": 16}
GEMMA3N = {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8}
QWEN4 = {
    "eos_token_id": 2,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 4,
    "indexer_compress_ratio": 2,
    "ple_layer_ids": [1, 3],  # counted from one
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 31,
    "make_ngram_vocab_size_divisible_by": 8,
    "split_ngram_parts": 1,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
DOTS3 = {
    "sliding_window": 4,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 8,
    "swa_kv_lora_rank": 8,
    "swa_head_dim": 16,
    "swa_qk_nope_head_dim": 8,
    "swa_v_head_dim": 8,
}

# what a family needs beyond the rules
OWN: dict[str, dict[str, Any]] = {
    "big_bird": {"attention_type": "original_full"},  # what it falls back to where sequences are short
    "blt": {"use_cache": False},  # its cache asks the whole config for a number of layers that it lacks
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v4": {"compress_rate_csa": 2, "compress_rate_hca": 4},  # else longer than the sequences
    "dots3_note": {"text_config": DOTS3},
    "dots3_note_text": DOTS3,
    "gemma3n": {"text_config": GEMMA3N},
    "gemma3n_text": GEMMA3N,
    "gemma4": {"text_config": GEMMA4},
    "gemma4_text": GEMMA4,
    "gemma4_unified": {"text_config": GEMMA4},
    "gemma4_unified_text": GEMMA4,
    "falcon_h1": {"mamba_d_head": 16},
    "git": {"vision_config": {"image_size": 16, "patch_size": 16}},
    "got_ocr2": {"vision_config": {"image_size": 32, "window_size": 2, "global_attn_indexes": [0]}},
    "hunyuan_v1_moe": {"num_experts": 4},
    # experts in layers 0 and 3, attention in 1 and 3: all four pairs
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1,
              "expert_layer_period": 3, "expert_layer_offset": 0},
    "llama4": {"text_config": {"interleave_moe_layer_step": 2}},
    "llama4_text": {"interleave_moe_layer_step": 2},
    "mamba2": {"head_dim": 16},
    "mllama": {"text_config": {"cross_attention_layers": [1]}},
    "musicgen": {"decoder": {"num_codebooks": 1}},  # a row of ids for each codebook otherwise
    "musicgen_melody": {"decoder": {"num_codebooks": 1}},
    "qwen4_exp": {"text_config": QWEN4},
    "qwen4_exp_text": QWEN4,
    # the chunks must divide the length, and the hashing be the same each time
    "reformer": {"local_attn_chunk_length": 2, "lsh_attn_chunk_length": 2,
                 "axial_pos_embds": False, "hash_seed": 0, "num_buckets": 2},
    "xlm": {"causal": True},
    "xlnet": {"attn_type": "uni"},
    # twice what its heads' sizes are rounded up to a multiple of; the kernel that takes whole chunks
    # changes in place what its backward needs when it also fills the cache
    "xlstm": {"hidden_size": 128, "chunk_size": 64},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"sliding_window": 4, "num_experts_per_tok": 1},  # it takes no other number
}  # fmt: skip

# gemma3n sees by a model of timm, which need not be installed; its tests show it no image
PLAIN_VISION = SiglipVisionConfig(
    hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, image_size=32,
    patch_size=16, vocab_size=8, vocab_offset=VOCABULARY, rms_norm_eps=1e-6,
)  # fmt: skip

# the part of the whole that the causal language model is made of, where `from_config` does not find it
PART_OF_WHOLE = {"musicgen": "decoder", "musicgen_melody": "decoder"}

# whose own loss compares each token with its own label
UNSHIFTED = frozenset({
    "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "cpmant", "marian", "mbart", "mvp",
    "pegasus", "plbart", "trocr", "whisper", "xlnet",
})  # fmt: skip

ASSISTANT = "its forward takes another model's embeddings, keys and values instead of ids, and no labels"

# families that cannot be run whole with `input_ids` on this machine, and why
SKIPPED: dict[str, str] = {
    "gemma4_assistant": ASSISTANT,
    "gemma4_unified_assistant": ASSISTANT,
}


def limit_of(name: str) -> int | None:
    return next((limit for pattern, limit in LIMITS if re.fullmatch(pattern, name)), None)


def small(name: str, value: Any, layers: int) -> Any:
    """What the field `name` becomes in a tiny config, None where it may stay as it is."""
    if name.endswith(("_token_id", "_token_index")):
        return SPECIAL.get(name, 0) if not isinstance(value, int) or value >= FIRST_PLAIN_TOKEN else value
    if isinstance(value, float):
        # nothing random: the comparison is of gradients in training mode
        return 0.0 if value and re.search(r"drop|jitter", name) else None
    if name == "is_decoder":
        return True  # BERT and its kin look both ways otherwise
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    if DEPTH.fullmatch(name):
        return layers
    if TOP_K.fullmatch(name):
        return 2
    if name in ("first_k_dense_replace", "num_dense_layers"):
        return max(1, layers // 2)
    limit = limit_of(name)
    return None if limit is None else min(value, limit)


def kinds_of(model_type: str, name: str, default: Any) -> list[str]:
    kinds = KINDS.get(model_type) if name == "layer_types" else None
    if name == "mlp_layer_types" and set(default or ()) == {"sparse"}:
        kinds = ("dense", "sparse")
    if name == "indexer_types":
        kinds = ("full", "shared")  # a shared one takes what the layer before it has selected
    return list(kinds or dict.fromkeys(default or ()))


def kinds_for(name: str, kinds: list[str], layers: int) -> list[str]:
    """A list with an entry for each layer, in which every kind that the family has by default occurs."""
    if name == "mlp_layer_types":  # in runs, so that they meet every kind of attention, which alternates
        return [kinds[i * len(kinds) // layers] for i in range(layers)]
    return [kinds[i % len(kinds)] for i in range(layers)]


def options_of(config: PretrainedConfig, layers: int) -> dict[str, Any]:
    """What to give the class of `config` to make it tiny; `config` is the family's default."""
    options: dict[str, Any] = {}
    # not through getattr, which refuses what a per-layer config may override
    values = vars(config)
    for field in fields(config):
        name, value = field.name, values.get(field.name, field.default)
        if isinstance(value, list) and isinstance(field.default, int):
            value = field.default  # which a family has repeated for every layer
        if isinstance(value, PretrainedConfig):
            options[name] = part_of(name, value, layers)
        elif name in ("layer_types", "mlp_layer_types", "layers_block_type", "indexer_types"):
            kinds = kinds_of(config.model_type, name, value)
            options |= {name: kinds_for(name, kinds, layers)} if kinds else {}
        elif name == "mlp_only_layers":
            options[name] = [0]  # a dense one among the sparse
        elif (name in OPEN and value is None) or name == "num_key_value_heads":
            options[name] = OPEN[name]
        elif value is None or (field.default is None and name not in SPECIAL):
            continue  # a size that the family finds from the others
        elif (tiny := small(name, value, layers)) is not None:
            options[name] = tiny
    if "kv_lora_rank" in options and "num_key_value_heads" in options:
        options["num_key_value_heads"] = options["num_attention_heads"]  # a latent gives every head its own
    return options


def part_of(name: str, config: PretrainedConfig, layers: int) -> dict[str, Any]:
    """The same for one part of a model of several; only the text's is cut into stages."""
    text = name in ("text_config", "decoder", "global_config")
    return {"model_type": config.model_type, **options_of(config, layers if text else 1)}


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`changes` over `base`, in the parts of a model of several too."""
    result = dict(base)
    for name, value in changes.items():
        old = result.get(name)
        both = isinstance(old, dict) and isinstance(value, dict)
        result[name] = merged(old, value) if both else value  # type: ignore[arg-type]
    return result


def by_depth(model_type: str, layers: int) -> dict[str, Any]:
    """What a family needs beyond the rules that is a list with an entry for each layer."""
    if model_type == "bamba":
        return {"attn_layer_indices": list(range(1, layers, 2))}
    if model_type == "gpt_neo":
        return {"attention_types": [[kinds_for("", ["global", "local"], layers), 1]]}
    if model_type == "reformer":
        return {"attn_layers": kinds_for("", ["local", "lsh"], layers)}
    sparsity = {"activation_sparsity_pattern": [0.5] * (layers // 2) + [0.0] * (layers - layers // 2)}
    if model_type == "gemma3n":
        return {"text_config": sparsity}
    return sparsity if model_type == "gemma3n_text" else {}


def tiny_config(model_type: str, *, layers: int = 4, **changes: Any) -> PretrainedConfig:
    """With four layers or more; a few families cannot show all their kinds in fewer."""
    options = options_of(CONFIG_MAPPING[model_type](), layers)
    for more in (by_depth(model_type, layers), OWN.get(model_type, {}), changes):
        options = merged(options, more)
    config: PretrainedConfig = AutoConfig.for_model(model_type, **deepcopy(options))
    if model_type == "gemma3n":
        vars(config)["vision_config"] = deepcopy(PLAIN_VISION)  # past the check of its type
    return getattr(config, PART_OF_WHOLE[model_type]) if model_type in PART_OF_WHOLE else config


def unsettle(model: PreTrainedModel, seed: int) -> None:
    """Noise on every parameter that is constant, since a zero weight hides the gradients behind it."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.numel() and bool((parameter == parameter.flatten()[0]).all()):
                parameter += 0.02 * torch.randn(parameter.shape, generator=generator)


def class_of(model_type: str) -> type[PreTrainedModel]:
    return getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])  # type: ignore[no-any-return]


def tiny_model(
    model_type: str, dtype: torch.dtype = torch.float32, *, seed: int = 0, **changes: Any
) -> PreTrainedModel:
    config = tiny_config(model_type, **changes)
    torch.manual_seed(seed)
    if model_type in PART_OF_WHOLE:
        model: PreTrainedModel = class_of(model_type)(config)
    else:
        # the grouped product of the default experts takes no float64
        model = AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    unsettle(model, seed)
    return model.to(dtype).train()


def tiny_batch(model_type: str, rows: int = 4, length: int = 12) -> dict[str, Tensor]:
    """Rows of plain tokens, some of whose labels are left out; reformer takes an even length only."""
    generator = torch.Generator().manual_seed(rows * 1000 + length)
    ids = torch.randint(FIRST_PLAIN_TOKEN, VOCABULARY, (rows, length), generator=generator)
    labels = ids.clone()
    labels[0, : length // 2] = -100
    labels[-1, 3] = -100
    if model_type == "git":
        labels = labels[:, 2:]  # it scores what comes after the image's tokens, of which there are two
    if model_type in PART_OF_WHOLE:
        labels = labels[:, :, None]  # for each codebook
    return {"input_ids": ids, "labels": labels}
