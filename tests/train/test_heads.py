"""Training a model's own head: loss, gradients and weights of transformers in one process, and resuming."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from penstock.cli.dry_run import memory
from penstock.errors import ConfigError, DataError, ModelError
from penstock.train.config.sections import TrainConfig
from penstock.train.preflight import dry_run, preflight
from penstock.train.run import run
from support import heads
from support.covering import some
from support.pool import Pool
from support.reference import assert_gradients
from support.refusals import refuses
from support.same_runs import resumes_bit_for_bit, trains_as_alone
from support.tiny import QWEN3, checkpoint, config, metrics

PAD = 7  # no text has this byte
NAMES = {"0": "low", "1": "middle", "2": "high"}
ROWS = {**QWEN3, "architectures": ["Qwen3ForSequenceClassification"], "pad_token_id": PAD, "id2label": NAMES}
TAGS = {**ROWS, "architectures": ["Qwen3ForTokenClassification"], "classifier_dropout": 0.0}
BERT = {
    "model_type": "bert", "vocab_size": 256, "hidden_size": 16, "intermediate_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "pad_token_id": PAD, "id2label": NAMES,
    "architectures": ["BertForSequenceClassification"],
}  # fmt: skip
SEVERAL = "multi_label_classification"


def class_of(at: int) -> int:
    return (at * at + at // 3) % 3


def text_of(at: int) -> str:
    return chr(97 + 7 * class_of(at)) * (1 + at % 11) + "abcdefg"[: 1 + at % 7]


def label_of(at: int, problem: str | None) -> Any:
    """A number, a name or numbers, by the problem."""
    if problem == SEVERAL:
        return [int(class_of(at) == 0), 1, at % 2]
    if problem == "regression":
        return [class_of(at) / 3, -0.5, at / 10]
    return NAMES[str(class_of(at))] if at % 2 else class_of(at)


def with_labels(
    folder: Path, model: dict[str, Any], keys: dict[str, Any] | None = None, count: int = 40, **train: Any
) -> TrainConfig:
    problem = model.get("problem_type")
    rows = [{"text": text_of(at), "label": label_of(at, problem)} for at in range(count)]
    return of_records(folder, model, "classification", rows, keys, **train)


def with_tags(folder: Path, keys: dict[str, Any] | None = None, count: int = 40, **train: Any) -> TrainConfig:
    """Words of one to nine letters, whose class is that of their length; some words have none."""
    rows: list[dict[str, Any]] = []
    for at in range(count):
        words = [chr(97 + (at + place) % 20) * (1 + (at * place) % 9) for place in range(1 + at % 5)]
        rows.append({"words": words, "labels": [-100 if len(word) == 5 else len(word) % 3 for word in words]})
        rows[-1]["labels"][0] = "high"
    return of_records(folder, TAGS, "token_classification", rows, keys, **train)


def of_records(
    folder: Path, model: dict[str, Any], kind: str, rows: Sequence[Any], keys: Any, **train: Any
) -> TrainConfig:
    (folder / "records.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "out").mkdir(exist_ok=True)
    data = {"path": str(folder / "records.jsonl"), "kind": kind, "sequence_length": 24, "held_out": 0.2}
    return config(
        folder, model, {f"data.{key}": value for key, value in data.items()} | (keys or {}), **train
    )


def padded(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The microbatches as one batch, each entry padded at its end."""
    longest = max(part["input_ids"].shape[1] for part in parts)
    ends = {"input_ids": PAD, "attention_mask": 0, "labels": -100}

    def whole(name: str, value: Tensor) -> Tensor:
        missing = longest - value.shape[1] if value.shape == parts_of[name] else 0
        return torch.nn.functional.pad(value, (0, missing), value=ends[name])

    batch = []
    for part in parts:
        parts_of = dict.fromkeys(ends, part["input_ids"].shape)
        batch.append({name: whole(name, value) if value.dim() > 1 else value for name, value in part.items()})
    return {name: torch.cat([part[name] for part in batch]) for name in ends}


def of_config(auto: Any, made: PretrainedConfig, pipe: Any) -> PreTrainedModel:
    model: PreTrainedModel = auto.from_config(made, dtype=torch.float64)
    model.load_state_dict(dict(pipe.named_parameters()), strict=False)
    return model.train()


CASES: dict[str, tuple[dict[str, Any], int]] = {
    "one class": (ROWS, 2),
    "one class, one rank": (ROWS, 1),
    "several": ({**ROWS, "problem_type": SEVERAL}, 2),
    "numbers": ({**ROWS, "problem_type": "regression"}, 2),
    "an encoder": (BERT, 2),
}


@pytest.mark.parametrize("case", some(CASES, *(name for name in CASES if name != "one class")))
def test_loss_and_gradients_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    model, ranks = CASES[case]
    keys = {"model.dtype": "float64", "pipeline.ranks": ranks}
    prepared = preflight(with_labels(tmp_path, model, keys, batch_size=7))
    pipe = prepared.auto.build(prepared.model)
    parts: Any = prepared.data.batch(1).content
    whole = of_config(AutoModelForSequenceClassification, prepared.plan.source.model.config, pipe)
    batch = padded(parts)
    texts = [bytes(row[row != PAD].tolist()).decode() for row in batch["input_ids"]]
    known = {text_of(at): label_of(at, model.get("problem_type")) for at in range(40)}
    labels = [known[text] for text in texts]
    ids = {name: int(number) for number, name in NAMES.items()}
    labels = [ids.get(label, label) if isinstance(label, str) else label for label in labels]
    expected = torch.tensor(labels, dtype=torch.float32 if model.get("problem_type") else torch.int64)
    assert batch["labels"].dtype == expected.dtype
    assert torch.equal(batch["labels"], expected)
    assert torch.equal(batch["attention_mask"], (batch["input_ids"] != PAD).long())
    labels_of_transformers = expected.double() if expected.is_floating_point() else expected
    loss, gradients = heads.own_step(whole, {**batch, "labels": labels_of_transformers})
    result = pipe.step(parts)
    assert result.loss == pytest.approx(loss, rel=1e-12)
    assert_gradients(gradients_by_name(pipe), gradients, 1e-10)


def gradients_by_name(pipe: Any) -> dict[str, Any]:
    return {name: parameter.grad for name, parameter in pipe.named_parameters() if parameter.grad is not None}


def test_labels_of_words_give_the_gradients_of_transformers(tmp_path: Path) -> None:
    prepared = preflight(with_tags(tmp_path, {"model.dtype": "float64"}, batch_size=7))
    pipe = prepared.auto.build(prepared.model)
    parts: Any = prepared.data.batch(1).content
    whole = of_config(AutoModelForTokenClassification, prepared.plan.source.model.config, pipe)
    batch = padded(parts)
    assert (batch["labels"][:, 0] == 2).all()  # a row's first token counts, also where no other one does
    assert len(prepared.data.rows) + len(prepared.data.held_out) == 40
    loss, gradients = heads.own_step(whole, batch)
    result = pipe.step(parts)
    assert result.tokens == int((batch["labels"] != -100).sum())
    assert result.loss == pytest.approx(loss, rel=1e-12)
    assert_gradients(gradients_by_name(pipe), gradients, 1e-10)


@pytest.mark.parametrize("kind", ["rows", "tokens"])
def test_a_run_learns_classes_resumes_bit_for_bit_and_loads(kind: str, tmp_path: Path) -> None:
    of_rows = kind == "rows"
    lasting: dict[str, Any] = {"steps": 8, "checkpoint_every": 4, "evaluate_every": 4}
    made = with_labels(tmp_path, ROWS, **lasting) if of_rows else with_tags(tmp_path, **lasting)
    prepared = preflight(made)
    run(prepared)
    rows, name = metrics(tmp_path), "accuracy" if of_rows else "token_accuracy"
    evaluated = [row for row in rows if "held_out_loss" in row]
    assert evaluated[-1]["held_out_loss"] < evaluated[0]["held_out_loss"]
    assert "perplexity" not in evaluated[-1]
    assert all(0 <= row[name] <= 1 for row in rows if "loss" in row)
    auto = AutoModelForSequenceClassification if of_rows else AutoModelForTokenClassification
    model = auto.from_pretrained(checkpoint(tmp_path, 8))
    assert model.config.id2label == {int(at): name for at, name in NAMES.items()}
    hits = total = 0
    for held_out in prepared.data.held_out_batches(made.train.evaluate_batches):
        batch = padded(held_out.content)  # type: ignore[arg-type]
        with torch.no_grad():
            likeliest = model(
                input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
            ).logits.argmax(-1)
        hits += int((likeliest == batch["labels"]).sum())
        total += int((batch["labels"] != -100).sum())
    assert hits > 0
    last = evaluated[-1]
    assert (last[f"held_out_{name}"], last["tokens"]) == (pytest.approx(hits / total), total)
    resumes_bit_for_bit(tmp_path, made)


@pytest.mark.parametrize("problem", some([None, SEVERAL], None))
def test_a_run_ends_with_the_weights_of_a_plain_loop(problem: str | None, tmp_path: Path) -> None:
    model = {**ROWS, "problem_type": problem}
    optimizer = {"optimizer.warmup_steps": 0, "optimizer.schedule": "constant", "optimizer.weight_decay": 0.0}
    prepared = preflight(with_labels(tmp_path, model, {"model.dtype": "float64", **optimizer}, steps=3))
    pipe = prepared.auto.build(prepared.model)
    whole = of_config(AutoModelForSequenceClassification, prepared.plan.source.model.config, pipe)
    section: Any = prepared.config.optimizer
    plain = torch.optim.AdamW(
        whole.parameters(), section.learning_rate, section.betas, section.eps, weight_decay=0.0
    )
    for step in (1, 2, 3):
        batch = padded(prepared.data.batch(step).content)  # type: ignore[arg-type]
        plain.zero_grad()
        if problem == SEVERAL:
            batch["labels"] = batch["labels"].double()
        with heads.double():
            whole(**batch, use_cache=False).loss.backward()
        whole.config.problem_type = problem
        torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
        plain.step()
    run(prepared)
    trained = AutoModelForSequenceClassification.from_pretrained(checkpoint(tmp_path, 3), dtype=torch.float64)
    for name, expected in whole.named_parameters():
        torch.testing.assert_close(trained.get_parameter(name), expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("problem", some([None, SEVERAL], SEVERAL))
def test_the_split_is_checked_with_labels_of_rows(
    problem: str | None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = {**ROWS, "problem_type": problem}
    run(preflight(with_labels(tmp_path, model, steps=1, check="always")))
    assert "gradients equal the whole one's" in capfd.readouterr().out


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
def test_an_adapter_of_a_tagger_trains_the_whole_head(tmp_path: Path) -> None:
    """The check compares every gradient with the whole model's."""
    from peft import AutoPeftModelForTokenClassification

    torch.manual_seed(0)
    base = AutoModelForTokenClassification.from_config(AutoConfig.for_model(**TAGS))
    base.save_pretrained(tmp_path / "model")
    keys = {"model": {"path": str(tmp_path / "model")}, "adapter": {"r": 4}}
    run(preflight(with_tags(tmp_path, keys, steps=2, check="always")))
    adapted = AutoPeftModelForTokenClassification.from_pretrained(checkpoint(tmp_path, 2))
    head = adapted.base_model.model.score
    assert not hasattr(head, "lora_A")
    assert not torch.equal(head.modules_to_save["default"].weight, base.score.weight)


def test_a_mesh_trains_as_one_pipeline_does(pool: Pool, tmp_path: Path) -> None:
    """Two pipelines of two ranks, seven rows a step, and a single held-out row for both."""
    keys = {"train.batch_size": 7, "parallel.dp_replicate": 2, "data.held_out": 0.02}
    made = with_labels(tmp_path, ROWS, keys)
    trains_as_alone(pool, tmp_path, made, ("accuracy", "held_out_accuracy"))


def test_a_head_of_another_kind_is_refused(tmp_path: Path) -> None:
    with refuses(ConfigError, "data.kind=classification for Qwen3ForCausalLM", "labels are of rows"):
        preflight(with_labels(tmp_path, {**QWEN3, "pad_token_id": PAD, "num_labels": 3}))
    with refuses(ConfigError, "data.kind=classification for Qwen3ForTokenClassification", "of rows"):
        preflight(with_labels(tmp_path, TAGS))
    with refuses(ModelError, "with the loss of next tokens", "its head", "data.kind=classification"):
        preflight(config(tmp_path, ROWS))
    with refuses(ConfigError, "BertForMaskedLM", "its head has 256 outputs"):
        masked = {**BERT, "architectures": ["BertForMaskedLM"]}
        rows = [{"words": ["a"], "labels": [1]}] * 20
        preflight(of_records(tmp_path, masked, "token_classification", rows, {}))


def test_a_run_is_planned_without_its_data(tmp_path: Path) -> None:
    """The account of memory took every head for one of next tokens."""
    for made in (with_labels(tmp_path, ROWS), with_tags(tmp_path)):
        assert all(rank.total > 0 for rank in memory(dry_run(made)))


def test_rows_need_the_id_of_padding(tmp_path: Path) -> None:
    with refuses(ConfigError, "a model without pad_token_id", "pads rows"):
        preflight(with_labels(tmp_path, {**ROWS, "pad_token_id": None}))


def test_fewer_held_out_rows_of_numbers_than_pipelines_are_refused(tmp_path: Path) -> None:
    """No row of numbers can stand in for a missing one: each would count in the loss."""

    data = preflight(with_labels(tmp_path, {**ROWS, "problem_type": "regression"})).data
    few = replace(data, parts=len(data.held_out) + 1, part=0)
    with refuses(DataError, "held-out rows on a mesh of"):
        few.held_out_batches(4)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("train.label_smoothing", 0.1, "is not for labels of rows"),
        ("output.sample_prompt", "a", "is not for labels of rows"),
        ("train.ramp", [{"until": 1, "sequence_length": 8}], "is not for labels of rows"),
        ("data.packing", "best_fit", "a row is one text with its labels"),
        ("data.overlong", "cut", "would part a text from its label"),
        ("data.mixture", [{"path": "a", "kind": "text"}], "all rows of a batch have labels of one kind"),
        ("output.keep.metric", "held_out_token_accuracy", "has held_out_accuracy"),
        ("train.loss", "dpo", "compares chosen and rejected rows"),
    ],
)
def test_settings_that_labels_do_not_have_are_refused(
    key: str, value: Any, said: str, tmp_path: Path
) -> None:
    keys = {key: value} | ({"data.path": None} if key == "data.mixture" else {})
    if key == "data.mixture":
        keys["data.mixture"] = [*value, {"path": "b"}]
    with pytest.raises(ValueError, match=said):
        with_labels(tmp_path, ROWS, keys)
