"""The zoo keeps its promises: every family is in it, hybrids are hybrid, and nothing is random."""

from __future__ import annotations

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from support import zoo

# for each family the field that says what its layers are, and all the kinds that must be there
HYBRIDS: dict[str, tuple[str, set[str]]] = {
    "qwen3_next": ("layer_types", {"linear_attention", "full_attention"}),
    "zamba2": ("layers_block_type", {"linear_attention", "hybrid"}),
    "nemotron_h": ("layer_types", {"linear_attention", "moe", "full_attention", "mlp"}),
    "gemma3_text": ("layer_types", {"sliding_attention", "full_attention"}),
    "lfm2": ("layer_types", {"conv", "full_attention"}),
    "hy_v4": ("indexer_types", {"full", "shared"}),
    "glm4_moe_lite": ("mlp_layer_types", {"dense", "sparse"}),
}

# a plain one, a hybrid, a router, shared keys and values with a second embedding, one of several parts, two
# that score other positions than the next, and one whose classes `from_config` does not match
FEW = ("llama", "zamba2", "phimoe", "gemma3n_text", "gemma3", "bart", "git", "musicgen")


def test_every_family_is_in_the_zoo() -> None:
    assert tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) == zoo.TYPES
    assert set(zoo.SKIPPED) | set(zoo.OWN) | set(zoo.KINDS) <= set(zoo.TYPES)
    assert len(zoo.TYPES) - len(zoo.SKIPPED) >= 150


@pytest.mark.parametrize("model_type", HYBRIDS)
def test_a_hybrid_has_every_kind_of_layer(model_type: str) -> None:
    field, kinds = HYBRIDS[model_type]
    found = getattr(zoo.tiny_config(model_type), field)
    assert len(found) == 4
    assert set(found) == kinds


def test_shared_blocks_and_shared_keys_occur() -> None:
    assert zoo.tiny_config("zamba").layers_block_type.count("hybrid") >= 2
    config = zoo.tiny_config("gemma4").get_text_config()
    assert config.num_kv_shared_layers
    assert config.hidden_size_per_layer_input


@pytest.mark.parametrize("model_type", FEW)
def test_the_loss_is_the_same_each_time(model_type: str) -> None:
    batch = zoo.tiny_batch(model_type)
    models = [zoo.tiny_model(model_type) for _ in range(2)]
    assert all(model.training for model in models)
    losses = torch.stack([model(**batch).loss for model in (*models, models[0])])
    assert losses.isfinite().all()
    assert len(set(losses.tolist())) == 1


@pytest.mark.parametrize("model_type", FEW)
def test_no_parameter_is_constant(model_type: str) -> None:
    for name, parameter in zoo.tiny_model(model_type).named_parameters():
        assert parameter.numel() == 1 or parameter.std() > 0, name


def test_changes_reach_the_config() -> None:
    config = zoo.tiny_config("gemma3", layers=6, text_config={"sliding_window": 5})
    assert config.text_config.num_hidden_layers == 6
    assert config.text_config.sliding_window == 5
    assert zoo.tiny_config("llama", tie_word_embeddings=True).tie_word_embeddings
