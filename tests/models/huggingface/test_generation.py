"""What a stage keeps between the forwards of a generation, and what transformers prepares for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import DynamicCache, PreTrainedTokenizerFast

from penstock import AutoPipeline
from penstock.errors import ConfigError
from penstock.models.huggingface.generation import (
    ROWS,
    GeneratingCall,
    count,
    prepare,
    split_options,
)
from support import zoo
from support.families import tiny_model
from support.generated import NEW, PAD, over_stages, prompts, whole
from support.refusals import refuses


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "jamba", "falcon_h1", "deepseek_v4"])
def test_layers_of_other_stages_count_tokens(model_type: str) -> None:
    """As the same layers of the whole model do, for masks and for states."""
    model = zoo.tiny_model(model_type).eval()
    full, stage = DynamicCache(config=model.config), DynamicCache(config=model.config)
    ids = prompts(padded=False)["input_ids"]
    for tokens in (ids, ids[:, :1], ids[:, :1]):
        model(input_ids=tokens, past_key_values=full, use_cache=True)
        seen = 6 + (0 if tokens is ids else 1)
        count(stage, full.get_seq_length())
        for layer, same in zip(stage.layers, full.layers, strict=True):
            if hasattr(same, "get_seq_length"):
                assert layer.get_seq_length() == same.get_seq_length() >= seen
                assert layer.get_mask_sizes(1) == same.get_mask_sizes(1)
            if hasattr(same, "has_previous_state"):
                assert all(layer.has_previous_state.values())
    keys = [layer.keys for layer in stage.layers if getattr(layer, "keys", None) is not None]
    assert all(key.nbytes <= full.get_seq_length() for key in keys)  # a byte for each token


def test_a_stage_has_entries_of_its_own_layers_alone() -> None:
    model = tiny_model("llama")
    pipe = AutoPipeline(ranks=2, microbatches=1).build(model)

    class Ids:
        index = 0

        def so_far(self) -> torch.Tensor:
            return prompts()["input_ids"]

    first = pipe.stages[0]
    call = GeneratingCall(first.module, first.call, is_first=True)
    generating = call.prepare(0, prompts(), {"max_new_tokens": 2})
    with torch.no_grad():
        call((), {ROWS: Ids()})
    sizes = [0 if layer.keys is None else layer.keys.shape for layer in generating.cache.layers]
    assert sizes == [(5, 2, 6, 8), (5, 2, 6, 8), (1, 1, 6, 1), (1, 1, 6, 1)]
    mask = generating.arguments["attention_mask"]
    assert mask.shape == (5, 7)
    assert generating.arguments["position_ids"][0].tolist() == [0, 0, 0, 0, 1, 2, 3]


def test_options_and_entries_are_told_apart() -> None:
    options = {"top_k": 3, "attention_mask": 1, "tokenizer": 2, "pixel_values": None, "eos_token_id": None}
    assert split_options(options) == (
        {"attention_mask": 1},
        {"top_k": 3, "tokenizer": 2, "eos_token_id": None},
    )


def tokenizer() -> Any:
    """Each token is a letter."""
    made = Tokenizer(WordLevel({letter(token): token for token in range(64)}, unk_token=letter(0)))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def letter(token: int) -> str:
    return chr(ord("0") + token)


def test_stop_strings() -> None:
    model = tiny_model("llama")
    new = whole(model, prompts())[1, 6:].tolist()
    text = "".join(map(letter, new[4:6]))
    options = {"stop_strings": [text], "tokenizer": tokenizer(), "eos_token_id": 63}
    expected = whole(model, prompts(), **options)
    assert (expected[1] == PAD).any()
    pipe = AutoPipeline(ranks=2, microbatches=2).build(model)
    assert torch.equal(over_stages(pipe, prompts(), **options), expected)


def test_transformers_error_is_typed() -> None:
    model = tiny_model("llama").eval()
    with refuses(ConfigError, "generate()", "strictly positive float"):
        prepare(model, prompts(), {"max_new_tokens": NEW, "do_sample": True, "temperature": -1.0})
