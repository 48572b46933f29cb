"""A prompt that cannot be continued is refused before training, and a sample ends where the positions do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GPT2LMHeadModel

from penstock.errors import ConfigError
from penstock.train.config.sections import OutputSection
from penstock.train.encoding.tokenizer import ByteTokenizer, HuggingFace
from penstock.train.preflight import preflight
from penstock.train.records.sample import sample
from support.tiny import GPT2_WITH_DROPOUT, QWEN3, config


def refused(folder: Path, prompt: str, **model: int) -> str:
    with pytest.raises(ConfigError) as caught:
        preflight(config(folder, {**QWEN3, **model}, {"output.sample_prompt": prompt}))
    return str(caught.value)


def test_a_prompt_that_no_model_could_continue_is_refused_before_training(tmp_path: Path) -> None:
    """0.5.0: it ended a finished run, with transformers' own traceback on process 0."""
    assert "output.sample_prompt='': it gives no token to go on from. Write some" in refused(tmp_path, "")
    said = refused(tmp_path, "a" * 65)
    assert said.startswith("output.sample_prompt: it is 65 tokens, and the model takes 64 positions (max_")
    assert "gives token id 195 and the model has ids 0 to 127" in refused(tmp_path, "é", vocab_size=128)


@pytest.mark.parametrize(
    ("prompt", "asked", "made"),
    [("def main(", 128, 24), ("a" * 31, 128, 2), ("a" * 32, 128, 1), ("ab", 5, 5)],
)
def test_a_sample_ends_where_the_positions_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prompt: str, asked: int, made: int
) -> None:
    """0.5.0: with a table of 32 positions and the default sample_tokens=128 it was an IndexError."""
    keys = {**GPT2_WITH_DROPOUT, "n_positions": 32}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**keys)).save_pretrained(tmp_path)
    ByteTokenizer().save(tmp_path)
    generate, lengths = GPT2LMHeadModel.generate, list[int]()

    def measured(model: GPT2LMHeadModel, **options: Any) -> Tensor:
        ids: Tensor = generate(model, **options)
        lengths.append(ids.shape[1])
        return ids

    monkeypatch.setattr(GPT2LMHeadModel, "generate", measured)
    section = OutputSection(sample_prompt=prompt, sample_tokens=asked)
    assert sample(tmp_path, section, 0).startswith(prompt)
    assert lengths == [len(prompt) + made]


def test_a_prompt_s_ids_are_those_that_the_checkpoint_s_tokenizer_gives(tmp_path: Path) -> None:
    ByteTokenizer().save(tmp_path)
    for text in ("", "def main(", " é"):
        assert HuggingFace(str(tmp_path)).prompt(text) == ByteTokenizer().prompt(text) == list(text.encode())
