"""Training masked language models: loss and gradients of transformers in one process, and resuming."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForMaskedLM

from penstock.cli.dry_run import memory
from penstock.errors import ConfigError, DataError
from penstock.train.config.sections import TrainConfig
from penstock.train.preflight import dry_run, preflight
from penstock.train.run import run
from support import heads
from support.masked import BERT, MASK, save_tokenizer, write_texts
from support.pool import Pool
from support.reference import assert_gradients, gradients_of
from support.refusals import refuses
from support.same_runs import resumes_bit_for_bit, trains_as_alone
from support.tiny import QWEN3, checkpoint, config, metrics


def with_masks(
    folder: Path, keys: dict[str, Any] | None = None, model: dict[str, Any] | None = None, **train: Any
) -> TrainConfig:
    (folder / "out").mkdir(exist_ok=True)
    data: dict[str, Any] = {
        "path": write_texts(folder), "kind": "masked", "tokenizer": save_tokenizer(folder),
        "sequence_length": 12, "held_out": 0.2, "packing": "none", "mask_probability": 0.3,
    }  # fmt: skip
    keys = {f"data.{key}": value for key, value in data.items()} | (keys or {})
    return config(folder, model or BERT, keys, **train)


def one_batch(content: Any) -> dict[str, Tensor]:
    """The whole batch, each entry padded at its end."""
    parts = [content] if isinstance(content, dict) else content
    longest, ends = max(part["input_ids"].shape[1] for part in parts), {"labels": -100}
    return {
        name: torch.cat([
            torch.nn.functional.pad(part[name], (0, longest - part[name].shape[1]), value=ends.get(name, 0))
            for part in parts
        ])
        for name in parts[0]
    }  # fmt: skip


@pytest.mark.parametrize("packing", ["none", "stream"])
def test_loss_and_gradients_are_those_of_transformers(packing: str, tmp_path: Path) -> None:
    keys = {"model.dtype": "float64", "data.packing": packing}
    prepared = preflight(with_masks(tmp_path, keys, batch_size=7))
    pipe = prepared.auto.build(prepared.model)
    content: Any = prepared.data.batch(1).content
    batch = one_batch(content)
    assert ("attention_mask" in batch) == (packing == "none")
    counted = batch["labels"] != -100
    assert 0 < int(counted.sum()) < counted.numel() // 2
    assert (batch["labels"][counted] >= 5).all()  # no special token
    assert (batch["input_ids"][~counted] != MASK).all()
    assert (batch["input_ids"][counted] == MASK).any()
    whole = AutoModelForMaskedLM.from_config(prepared.plan.source.model.config, dtype=torch.float64).train()
    whole.load_state_dict(dict(pipe.named_parameters()), strict=False)
    loss, gradients = heads.own_step(whole, batch)
    result = pipe.step(content)
    assert result.tokens == int(counted.sum())
    assert result.loss == pytest.approx(loss, rel=1e-12)
    assert_gradients(gradients_of(pipe), gradients, 1e-10)


def test_a_text_is_a_row_with_special_tokens_and_blank_ones_are_left_out(tmp_path: Path) -> None:
    prepared = preflight(with_masks(tmp_path, {"data.overlong": "truncate"}))
    assert "2 records without a token to train on are left out" in prepared.notes
    assert not any("the loss counts" in note for note in prepared.notes)
    data = prepared.data
    assert len(data.rows) + len(data.held_out) == 60
    for row in range(len(data.rows)):
        (piece,) = data.rows.read(row)
        assert (piece.ids[0], piece.ids[-1]) == (2, 3)
        assert len(piece.ids) <= 12
    cut = preflight(with_masks(tmp_path)).data
    assert len(cut.rows) + len(cut.held_out) > 60
    ids = [int(id) for row in range(len(cut.rows)) for piece in cut.rows.read(row) for id in piece.ids]
    assert set(ids) - {2, 3} == set(range(5, 15))


def test_a_run_learns_resumes_bit_for_bit_and_loads(tmp_path: Path) -> None:
    made = with_masks(tmp_path, steps=8, checkpoint_every=4, evaluate_every=4, check="always")
    prepared = preflight(made)
    run(prepared)
    rows = metrics(tmp_path)
    evaluated = [row for row in rows if "held_out_loss" in row]
    assert evaluated[-1]["held_out_loss"] < evaluated[0]["held_out_loss"]
    assert len({row["tokens"] for row in evaluated}) == 1  # the same masks each time
    last = evaluated[-1]
    assert last["perplexity"] == pytest.approx(math.exp(last["held_out_loss"]))
    model, summed, hits = AutoModelForMaskedLM.from_pretrained(checkpoint(tmp_path, 8)), 0.0, 0
    for held_out in prepared.data.held_out_batches(made.train.evaluate_batches):
        batch = one_batch(held_out.content)
        counted = batch["labels"] != -100
        with torch.no_grad():
            output = model.eval()(**batch)
        summed += float(output.loss) * int(counted.sum())
        hits += int((output.logits.argmax(-1) == batch["labels"])[counted].sum())
    assert last["held_out_loss"] == pytest.approx(summed / last["tokens"], rel=1e-5)
    assert last["held_out_token_accuracy"] == pytest.approx(hits / last["tokens"])
    resumes_bit_for_bit(tmp_path, made)


def test_a_mesh_trains_as_one_pipeline_does(pool: Pool, tmp_path: Path) -> None:
    """Two pipelines of two ranks, seven rows a step, and a single held-out row for both."""
    keys = {"train.batch_size": 7, "parallel.dp_replicate": 2, "data.held_out": 0.01}
    made = with_masks(tmp_path, keys)
    trains_as_alone(pool, tmp_path, made, ("tokens", "token_accuracy"))


def test_heads_and_tokenizers_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    tagger = {**BERT, "architectures": ["BertForTokenClassification"]}
    with refuses(ConfigError, "data.kind=masked for BertForTokenClassification", "its head has 2 outputs"):
        preflight(with_masks(tmp_path, model=tagger))
    with refuses(
        ConfigError, "data.kind=masked for Qwen3ForCausalLM", "labels are of masked tokens", "MaskedLM"
    ):
        preflight(with_masks(tmp_path, model=QWEN3))
    with refuses(DataError, "data.tokenizer=bytes", "this tokenizer has none"):
        preflight(with_masks(tmp_path, {"data.tokenizer": "bytes"}))
    padded = {"pipeline.shapes": "padded"}
    with refuses(ConfigError, "shapes='padded' for BertForMaskedLM", "may see padding"):
        preflight(with_masks(tmp_path, padded, {**BERT, "vocab_size": 128}))
    assert all(rank.total > 0 for rank in memory(dry_run(with_masks(tmp_path))))


def test_positions_before_the_first_token_are_no_room_for_tokens(tmp_path: Path) -> None:
    """RoBERTa's positions begin behind the id of padding: of 20 there are 18 for tokens."""
    roberta = {**BERT, "model_type": "roberta", "architectures": ["RobertaForMaskedLM"], "pad_token_id": 1,
               "type_vocab_size": 1, "max_position_embeddings": 20}  # fmt: skip
    keys = {"data.packing": "stream", "data.sequence_length": 18}
    run(preflight(with_masks(tmp_path, keys, roberta, steps=1)))
    with refuses(ConfigError, "data.sequence_length=19", "takes 18 positions"):
        preflight(with_masks(tmp_path, keys | {"data.sequence_length": 19}, roberta))


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("data.packing", "best_fit", "has no bounds of documents"),
        ("data.streaming", {}, "leave streaming out"),
        ("data.kind", "jsonl", "masks tokens, and data.kind=jsonl none"),
        ("output.sample_prompt", "a", "is not for labels of masked tokens"),
        ("train.label_smoothing", 0.1, "is not for labels of masked tokens"),
    ],
)
def test_settings_that_masks_do_not_have_are_refused(key: str, value: Any, said: str, tmp_path: Path) -> None:
    more = {"data.validation": {"path": "a"}} if key == "data.streaming" else {}
    with pytest.raises(ValueError, match=said):
        with_masks(tmp_path, {key: value, **more})
