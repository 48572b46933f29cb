"""Training reward models: loss, gradients and weights of one plain process and of TRL, and resuming."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel

from penstock.cli.dry_run import memory
from penstock.errors import ConfigError, ModelError
from penstock.train.config.sections import TrainConfig
from penstock.train.encoding.tokenizer import HuggingFace
from penstock.train.preflight import dry_run, preflight
from penstock.train.run import run
from support import heads
from support.pairs import plain_gradients
from support.pool import Pool
from support.reference import assert_gradients, gradients_of
from support.refusals import refuses
from support.same_runs import resumes_bit_for_bit, trains_as_alone
from support.tiny import QWEN3, assert_same_tensors, checkpoint, config, metrics
from support.trl import ROWS, trl_settings, trl_steps
from train.test_preference import preferences

PAD = 7  # no text has this byte
SCORES = {
    **QWEN3, "vocab_size": 258, "architectures": ["Qwen3ForSequenceClassification"], "num_labels": 1,
    "pad_token_id": PAD,
}  # fmt: skip


def with_scores(folder: Path, keys: dict[str, Any] | None = None, **train: Any) -> TrainConfig:
    data = {"path": preferences(folder), "kind": "preference", "sequence_length": 64, "held_out": 0.2}
    model = (keys or {}).pop("model.config", SCORES)
    keys = {f"data.{key}": value for key, value in data.items()} | (keys or {})
    return config(folder, model, keys, **{"loss": "reward", **train})


def whole_of(prepared: Any, pipe: Any) -> PreTrainedModel:
    made = prepared.plan.source.model.config
    model: PreTrainedModel = AutoModelForSequenceClassification.from_config(made, dtype=torch.float64)
    model.load_state_dict(dict(pipe.named_parameters()))
    return model.train()


def scores_of(model: PreTrainedModel, parts: list[dict[str, Tensor]]) -> Tensor:
    """Of each row by itself, without padding."""
    rows = [ids[mask == 1] for part in parts
            for ids, mask in zip(part["input_ids"], part["attention_mask"], strict=True)]  # fmt: skip
    return torch.cat([model(ids[None], use_cache=False).logits[:, 0] for ids in rows])


def bradley_terry(scores: Tensor, center: float = 0.0) -> Tensor:
    chosen, rejected = scores[::2], scores[1::2]
    return (-F.logsigmoid(chosen - rejected) + center * (chosen + rejected).square()).mean()


@pytest.mark.parametrize(("ranks", "center"), [(2, 0.0), (1, 0.1)])
def test_every_gradient_is_that_of_the_mean_over_pairs(ranks: int, center: float, tmp_path: Path) -> None:
    keys = {"model.dtype": "float64", "pipeline.ranks": ranks}
    loss = {"kind": "reward", "center": center}
    prepared = preflight(with_scores(tmp_path, keys, batch_size=5, loss=loss))
    pipe = prepared.auto.build(prepared.model)
    assert not any("the loss counts" in note for note in prepared.notes)  # it scores prompts too
    parts: Any = prepared.data.batch(1).content
    assert [len(part["input_ids"]) for part in parts] == [6, 4]
    for part in parts:
        assert sorted(part) == ["attention_mask", "input_ids"]
        assert torch.equal(part["attention_mask"], (part["input_ids"] != PAD).long())
        for chosen, rejected in zip(part["input_ids"][::2], part["input_ids"][1::2], strict=True):
            assert ord("b") not in chosen.tolist()
            assert ord("a") not in rejected.tolist()
    whole = whole_of(prepared, pipe)
    expected, gradients = plain_gradients(whole, lambda: bradley_terry(scores_of(whole, parts), center))
    result = pipe.step(parts)
    assert result.tokens == 5
    assert result.loss == pytest.approx(expected, rel=1e-12)
    assert_gradients(gradients_of(pipe), gradients, 1e-10)


def test_a_run_learns_to_score_resumes_bit_for_bit_and_loads(tmp_path: Path) -> None:
    made = with_scores(tmp_path, steps=4, checkpoint_every=2)
    prepared = preflight(made)
    run(prepared)
    rows = metrics(tmp_path)
    evaluated = [row for row in rows if "held_out_loss" in row]
    assert evaluated[-1]["held_out_loss"] < evaluated[0]["held_out_loss"]
    assert {"rewards/accuracies", "rewards/margins"} <= rows[1].keys()
    assert "perplexity" not in evaluated[-1]
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint(tmp_path, 4))
    with torch.no_grad():
        parts = [scores_of(model, batch.content)  # type: ignore[arg-type]
                 for batch in prepared.data.held_out_batches(made.train.evaluate_batches)]  # fmt: skip
    scores, last = torch.cat(parts), evaluated[-1]
    assert last["tokens"] == len(scores) // 2
    assert last["held_out_loss"] == pytest.approx(float(bradley_terry(scores)), rel=1e-5)
    right = (scores[::2] > scores[1::2]).float().mean()
    assert last["held_out_rewards/accuracies"] == pytest.approx(float(right))
    resumes_bit_for_bit(tmp_path, made)


def record_of(chosen: Tensor, rejected: Tensor) -> dict[str, str]:
    """The record that two rows of a batch were made of."""
    texts = [bytes(row[(row < 256) & (row != PAD)].tolist()).decode() for row in (chosen, rejected)]
    halves = [text.lstrip("q") for text in texts]
    return {"prompt": texts[0].removesuffix(halves[0]), "chosen": halves[0], "rejected": halves[1]}


@pytest.mark.filterwarnings("ignore::FutureWarning")  # between TRL and transformers
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed")
def test_three_steps_are_those_of_trl(tmp_path: Path) -> None:
    """RewardTrainer reads the same records, in the order of the run."""
    from trl import RewardConfig, RewardTrainer

    loss = {"kind": "reward", "center": 0.1}
    prepared = preflight(with_scores(tmp_path, {"model.dtype": "float64"}, batch_size=ROWS, loss=loss))
    pipe = prepared.auto.build(prepared.model)
    batches: Any = [prepared.data.batch(step).content for step in (1, 2, 3)]
    rows = [row for parts in batches for part in parts for row in part["input_ids"]]
    records = [record_of(*pair) for pair in zip(rows[::2], rows[1::2], strict=True)]
    tokenizer = HuggingFace("bytes").own
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(PAD)
    settings = trl_settings(RewardConfig, tmp_path / "trl", center_rewards_coefficient=0.1)
    with heads.double():
        expected, logged = trl_steps(RewardTrainer, settings, whole_of(prepared, pipe), records, tokenizer)
    optimizer, metrics_of = torch.optim.SGD(pipe.parameters(), settings.learning_rate), prepared.auto.loss_fn
    for parts, gradients, row in zip(batches, expected, logged, strict=True):
        pipe.zero_grad()
        assert pipe.step(parts).loss == pytest.approx(row["loss"], abs=1e-4)  # TRL logs four digits
        assert_gradients(gradients_of(pipe), gradients, 1e-9)
        means = metrics_of.metrics()  # type: ignore[union-attr]
        assert means["rewards/accuracies"] == pytest.approx(row["accuracy"])
        assert means["rewards/margins"] == pytest.approx(row["margin"], rel=1e-9)
        optimizer.step()


def test_a_mesh_trains_as_one_pipeline_does(pool: Pool, tmp_path: Path) -> None:
    """Two pipelines of two ranks, seven pairs a step: one has a pair more than the other."""
    keys = {"train.batch_size": 7, "data.held_out": 0.3, "parallel.dp_replicate": 2, "train.check": "always"}
    made = with_scores(tmp_path, keys)
    trains_as_alone(pool, tmp_path, made, ("rewards/margins",))


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
def test_an_adapter_has_the_head_and_peft_loads_both(tmp_path: Path) -> None:
    """The check compares every gradient with the whole model's; another run goes on from the adapter."""
    from peft import AutoPeftModelForSequenceClassification

    torch.manual_seed(0)
    base = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(**SCORES))
    base.save_pretrained(tmp_path / "model")
    model = {"path": str(tmp_path / "model")}
    brief: dict[str, Any] = {"steps": 2, "checkpoint_every": 1, "check": "always"}
    made = with_scores(tmp_path, {"model": model, "adapter": {"r": 4}}, **brief)
    prepared = preflight(made)
    run(prepared)
    trained, last = checkpoint(tmp_path, 2), metrics(tmp_path)[-2]
    adapted = AutoPeftModelForSequenceClassification.from_pretrained(trained)
    head = adapted.base_model.model.score.modules_to_save["default"].weight
    assert not torch.equal(head, base.score.weight)
    batches = prepared.data.held_out_batches(made.train.evaluate_batches)
    with torch.no_grad():
        scores = torch.cat([scores_of(adapted, batch.content) for batch in batches])  # type: ignore[arg-type]
    assert last["held_out_loss"] == pytest.approx(float(bradley_terry(scores)), rel=1e-5)
    trained.rename(tmp_path / "before")
    run(preflight(made, str(checkpoint(tmp_path, 1))))
    assert_same_tensors(tmp_path / "before", checkpoint(tmp_path, 2))
    keys = {"model": model, "adapter": {"path": str(tmp_path / "before")}}
    (tmp_path / "further").mkdir()
    run(preflight(with_scores(tmp_path / "further", keys, steps=1)))
    first = metrics(tmp_path / "further")[0]
    assert first["held_out_loss"] == pytest.approx(last["held_out_loss"], rel=1e-6)


def test_a_run_is_planned_without_its_data(tmp_path: Path) -> None:
    assert all(rank.total > 0 for rank in memory(dry_run(with_scores(tmp_path))))


def test_heads_that_give_no_score_are_refused(tmp_path: Path) -> None:
    several = {**SCORES, "num_labels": 2}
    causal = {**QWEN3, "vocab_size": 258}
    with refuses(ConfigError, "train.loss=reward for Qwen3ForSequenceClassification", "has num_labels=2"):
        preflight(with_scores(tmp_path, {"model.config": several}))
    with refuses(ConfigError, "train.loss=reward for Qwen3ForCausalLM", "labels of tokens", "num_labels: 1"):
        preflight(with_scores(tmp_path, {"model.config": causal}))
    with refuses(ConfigError, "train.loss=dpo for Qwen3ForSequenceClassification", "it compares"):
        preflight(with_scores(tmp_path, loss="dpo"))
    with refuses(ConfigError, "a model without pad_token_id", "train.loss=reward pads rows"):
        preflight(with_scores(tmp_path, {"model.config": {**SCORES, "pad_token_id": None}}))
    with refuses(ConfigError, "the axes tp=2 for", "only the next-token loss supports cp and tp"):
        dry_run(
            with_scores(tmp_path, {"model.config": {**SCORES, "num_key_value_heads": 2}, "parallel.tp": 2})
        )
    with refuses(ModelError, "shapes='padded' for Qwen3For", "outputs change"):
        preflight(with_scores(tmp_path, {"pipeline.shapes": "padded"}))


def test_a_reward_model_writes_no_sample(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"sample_prompt=a is not for train\.loss=reward"):
        with_scores(tmp_path, {"output.sample_prompt": "a"})
