"""What layers cost, counted on the meta device, beside what the shapes of their matrices say."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.models.split.balanced_split import LayerCosts
from penstock.models.split.multiply_adds import SEQUENCE, multiply_adds
from penstock.models.tracing.chain import find_chain
from penstock.models.tracing.probe import layer_kind
from support import zoo
from support.families import tiny_config


def costs_of(config: Any, sequence: int | None = None) -> LayerCosts:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return multiply_adds(model, find_chain(model), sequence)


QWEN3 = {
    "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 3, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.mark.parametrize("sequence", [64, 4096])
def test_a_dense_layer_counts_its_matrices_and_the_causal_half_of_attention(sequence: int) -> None:
    """Version 0.5.0 counted the head of Qwen3-0.6B as one layer: by its multiply-adds it is six to ten."""
    costs = costs_of(AutoConfig.for_model("qwen3", **QWEN3), sequence)
    matrices = 1024 * (16 + 8 + 8) * 128 + 16 * 128 * 1024 + 3 * 1024 * 3072
    layer = sequence * (matrices + sequence * 16 * 128)
    assert costs.layers == [layer] * 3
    assert (costs.embedding, costs.head) == (0, sequence * 1024 * 151_936)


def test_a_mixture_counts_the_experts_that_a_token_goes_to() -> None:
    config = tiny_config("mixtral", layers=2)
    hidden, inner = config.hidden_size, config.intermediate_size
    many = costs_of(config, 64).layers[0]
    config.num_experts_per_tok -= 1
    assert many - costs_of(config, 64).layers[0] == 64 * 3 * hidden * inner


def test_layers_of_another_kind_are_counted_apart() -> None:
    config = AutoConfig.for_model("glm4_moe", num_hidden_layers=4, first_k_dense_replace=1)
    dense, *sparse = costs_of(config, 64).layers
    assert len(set(sparse)) == 1
    assert dense != sparse[0]


@pytest.mark.parametrize(
    ("family", "field"),
    [("gemma3_text", "layer_types"), ("qwen3_next", "layer_types"), ("glm4_moe_lite", "mlp_layer_types")],
)
def test_layers_that_the_config_tells_apart_are_of_two_kinds(family: str, field: str) -> None:
    """Of a kind one layer is counted: windows, linear attention and mixtures are kinds of their own."""
    config = zoo.tiny_config(family)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    found = [layer_kind(layer) for layer in model.get_submodule(find_chain(model).layers).children()]
    named = getattr(config, field)
    assert len(set(named)) > 1
    for (kind, name), (other, its_name) in combinations(zip(found, named, strict=True), 2):
        assert name == its_name or kind != other


def test_a_layer_that_pads_short_rows_counts_its_parameters() -> None:
    """A state-space scan in chunks of 256 tokens does the same work for 16 and for 32."""
    config = AutoConfig.for_model(
        "mamba2", num_hidden_layers=2, hidden_size=32, num_heads=4, head_dim=16, n_groups=1
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    chain = find_chain(model)
    parameters = sum(parameter.numel() for parameter in model.get_submodule(f"{chain.layers}.0").parameters())
    assert multiply_adds(model, chain, 64).layers == [64 * parameters] * 2


def test_no_more_tokens_than_positions() -> None:
    config = tiny_config("llama", layers=2, max_position_embeddings=32)
    assert costs_of(config) == costs_of(config, 32)


def test_a_family_without_a_limit_of_positions_counts_the_usual_row() -> None:
    """XLNet says -1: its layers cost less than nothing, and no split was found."""
    config = AutoConfig.for_model("xlnet", d_model=32, d_inner=64, n_layer=2, n_head=4, vocab_size=64)
    assert config.max_position_embeddings == -1
    assert costs_of(config) == costs_of(config, SEQUENCE)
