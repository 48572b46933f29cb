"""The class of transformers for a config, and its head."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import (
    AutoConfig,
    BertForMaskedLM,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    PreTrainedModel,
)

from penstock import AutoPipeline
from penstock.models.auto_class import auto_class
from support import heads
from support.covering import some

CLASS_NUMBERS = torch.tensor([0, 4, 2, 2, -100, 1, 3])


KINDS = (LlamaForTokenClassification, LlamaForSequenceClassification, LlamaForCausalLM, BertForMaskedLM)


@pytest.mark.parametrize("kind", some(KINDS, LlamaForSequenceClassification, BertForMaskedLM))
def test_a_folder_opens_as_the_class_that_its_config_names(
    kind: type[PreTrainedModel], tmp_path: Path
) -> None:
    """0.5.0: a folder of any class opened as a causal language model: `architectures` was not read."""
    model_type = "bert" if kind is BertForMaskedLM else "llama"
    model = heads.built(kind, model_type, is_decoder=False, num_labels=5, pad_token_id=0)
    model.save_pretrained(tmp_path)
    assert auto_class(AutoConfig.from_pretrained(tmp_path)).from_config(model.config).__class__ is kind
    pipe = AutoPipeline(ranks=2, microbatches=2).build(tmp_path)
    batch = heads.row_batch(CLASS_NUMBERS) if "Sequence" in kind.__name__ else heads.token_batch()
    assert pipe.verify_against(model, batch).note == ""


@pytest.mark.parametrize("named", ["Qwen3ForCausalLM", 5, [None, 7], {"a": 1}])
def test_architectures_of_any_kind_are_read(named: object) -> None:
    """Unreleased: a config with text in place of a list of names was a TypeError."""
    config = AutoConfig.for_model("qwen3")
    config.architectures = named
    assert auto_class(config).__name__ == "AutoModelForCausalLM"
