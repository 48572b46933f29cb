"""The model that a pipeline is built from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from penstock.errors import HubError, ModelError
from penstock.models.source import open_source, sdpa_for_flash
from penstock.models.tracing.meta import is_empty


def config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )


def test_a_config_is_built_without_values_in_the_dtype_given() -> None:
    source = open_source(config(), torch.bfloat16, "eager")
    assert is_empty(source.model)
    assert source.model.dtype == torch.bfloat16
    assert source.model.config._attn_implementation == "eager"
    assert (source.files, source.adapter, source.commit, source.new) == ((), None, None, ())


@pytest.mark.parametrize("asked", [{"dtype": torch.bfloat16}, {"attention": "eager"}, {"mtp_factor": 0.1}])
def test_a_model_object_is_used_as_it_is(asked: dict[str, Any]) -> None:
    model = LlamaForCausalLM(config())
    assert open_source(model, torch.float32, "sdpa").model is model
    with pytest.raises(ModelError) as caught:
        open_source(model, **{"dtype": None, "attention": None, **asked})
    assert caught.value.rule == "a model object is not changed"


def test_a_folder_without_a_dtype_has_that_of_its_files(tmp_path: Path) -> None:
    LlamaForCausalLM(config()).to(torch.bfloat16).save_pretrained(tmp_path)
    bare = config()
    bare.dtype = None
    bare.save_pretrained(tmp_path)
    source = open_source(tmp_path, None, None)
    assert source.model.dtype == torch.bfloat16
    assert [file.parent for file in source.files] == [tmp_path]


def test_only_a_hub_name_has_a_revision(tmp_path: Path) -> None:
    for model in (config(), tmp_path):
        with pytest.raises(HubError) as caught:
            open_source(model, None, None, revision="main")
        assert caught.value.value.startswith("revision='main'")


def test_any_other_thing_is_refused() -> None:
    with pytest.raises(ModelError) as caught:
        open_source(5, None, None)
    assert caught.value.value == "a model given as int"


def test_flash_attention_is_torchs_own_inside_the_block_alone() -> None:
    before = {name: ALL_ATTENTION_FUNCTIONS[name] for name in ALL_ATTENTION_FUNCTIONS}
    with sdpa_for_flash():
        assert ALL_ATTENTION_FUNCTIONS["flash_attention_2"] is before["sdpa"]
    assert {name: ALL_ATTENTION_FUNCTIONS[name] for name in ALL_ATTENTION_FUNCTIONS} == before
