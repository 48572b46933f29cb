"""A prompt that cannot be continued is refused before training, and a sample ends where the positions do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from transformers import AutoModelForCausalLM

from penstock import Pipeline
from penstock.errors import ConfigError
from penstock.train.encoding.tokenizer import ByteTokenizer, HuggingFace
from penstock.train.preflight import preflight
from penstock.train.run import run
from support.covering import every, some
from support.refusals import refuses
from support.tiny import GPT2_WITH_DROPOUT, QWEN3, assert_same_tensors, checkpoint, config, metrics


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
    every(2, [("a" * 32, 128, 1), ("def main(", 128, 24), ("ab", 5, 5), ("a" * 31, 128, 2)]),
)
def test_a_sample_ends_where_the_positions_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prompt: str, asked: int, made: int
) -> None:
    """0.5.0: with a table of 32 positions and the default sample_tokens=128 it was an IndexError."""
    generate, lengths = Pipeline.generate, list[int]()

    def measured(pipe: Pipeline, ids: Tensor, **options: Any) -> Tensor:
        whole = generate(pipe, ids, **options)
        lengths.append(whole.shape[1])
        return whole

    monkeypatch.setattr(Pipeline, "generate", measured)
    keys = {"output.sample_prompt": prompt, "output.sample_tokens": asked}
    run(preflight(config(tmp_path, {**GPT2_WITH_DROPOUT, "n_positions": 32}, keys, steps=1)))
    assert lengths == [len(prompt) + 1, len(prompt) + made]  # the first one is a trial before any step
    (row,) = (row for row in metrics(tmp_path) if "sample" in row)
    assert row["sample"].startswith(prompt)


@pytest.mark.parametrize("precision", some(["float32", "mixed"], "mixed"))
def test_samples_come_while_training_which_does_not_notice_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], precision: str
) -> None:
    keys = {"output.sample_prompt": "AB", "output.sample_tokens": 8}
    plain, sampled = tmp_path / "plain", tmp_path / "sampled"
    for folder, more in ((plain, {}), (sampled, {**keys, "output.sample_every": 2})):
        folder.mkdir()
        run(preflight(config(folder, GPT2_WITH_DROPOUT, more, steps=5, precision=precision)))
    assert_same_tensors(checkpoint(plain, 5), checkpoint(sampled, 5))
    assert exact(plain) == exact(sampled)
    rows = [row for row in metrics(sampled) if "sample" in row]
    assert [row["step"] for row in rows] == [2, 4, 5]
    said = capsys.readouterr().out
    assert f"step 4/5  sample: {rows[1]['sample']}\n" in said
    assert f"sample by the trained model:\n{rows[-1]['sample']}\n" in said


def exact(folder: Path) -> list[tuple[Any, ...]]:
    keys = ("step", "loss", "held_out_loss", "grad_norm")
    return [tuple(row.get(key) for key in keys) for row in metrics(folder) if "sample" not in row]


def test_a_sample_is_what_transformers_generates_from_the_checkpoint(tmp_path: Path) -> None:
    keys = {"output.sample_prompt": "ABC", "output.sample_tokens": 12}
    run(preflight(config(tmp_path, keys=keys, steps=3)))
    model = AutoModelForCausalLM.from_pretrained(checkpoint(tmp_path, 3))
    ids = torch.tensor([list(b"ABC")])
    torch.manual_seed(preflight(config(tmp_path)).config.train.seed)
    plain = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=True,
                           temperature=0.6, pad_token_id=0)  # fmt: skip
    (row,) = (row for row in metrics(tmp_path) if "sample" in row)
    assert row["sample"] == ByteTokenizer().decode(plain[0].tolist())


def test_a_pipeline_that_cannot_generate_is_refused_before_the_first_step(tmp_path: Path) -> None:
    keys = {"output.sample_prompt": "AB", "pipeline.schedule": "dualpipe", "pipeline.microbatches": 4}
    with refuses(ConfigError, "generate() with schedule 'dualpipe'", "two copies of the model run"):
        run(preflight(config(tmp_path, keys=keys)))
    assert not any("loss" in row for row in metrics(tmp_path))


def test_every_so_many_steps_needs_a_prompt(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="sample_every is set and sample_prompt is not"):
        config(tmp_path, keys={"output.sample_every": 2})


def test_a_prompt_s_ids_are_those_that_the_checkpoint_s_tokenizer_gives(tmp_path: Path) -> None:
    ByteTokenizer().save(tmp_path)
    for text in ("", "def main(", " é"):
        assert HuggingFace(str(tmp_path)).prompt(text) == ByteTokenizer().prompt(text) == list(text.encode())
