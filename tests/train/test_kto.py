"""KTO in the trainer: TRL's steps, every weight; its references and its KL term; resuming, and a mesh."""

from __future__ import annotations

import copy
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.errors import ConfigError, DataError
from penstock.train.config.sections import TrainConfig
from penstock.train.encoding.tokenizer import HuggingFace
from penstock.train.preference import with_references
from penstock.train.preflight import Prepared, preflight
from penstock.train.run import run
from support.covering import some
from support.pairs import plain_logps
from support.pool import Pool
from support.refusals import refuses
from support.same_runs import resumes_bit_for_bit, trains_as_alone
from support.tiny import QWEN3, checkpoint, config, metrics, save_model, tensors
from support.trl import ROWS, trl_settings, trl_steps

MODEL = {**QWEN3, "vocab_size": 258}
NAMES = ("kl", "rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logps/rejected")


def rows(count: int = 40) -> list[dict[str, Any]]:
    """Prompts and completions of several lengths."""
    return [
        {"prompt": "q" * (1 + at % 5), "completion": "abc"[at % 3] * (2 + at % 7), "label": at % 3 != 1}
        for at in range(count)
    ]


def with_rows(
    folder: Path, keys: dict[str, Any] | None = None, records: Any = None, **train: Any
) -> TrainConfig:
    (folder / "out").mkdir(exist_ok=True)
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, records or rows())))
    data = {"path": str(folder / "rows.jsonl"), "kind": "unpaired", "sequence_length": 64, "held_out": 0.2}
    keys = {f"data.{key}": value for key, value in data.items()} | (keys or {})
    return config(folder, MODEL, keys, **{"loss": "kto", **train})


def taken(prepared: Prepared, count: int) -> list[dict[str, Any]]:
    """The records of the first rows of the run, in their order."""
    data, own = prepared.data, HuggingFace("bytes")
    made = []
    for row in data.take(0, count)[1]:
        (piece,) = data.rows.read(row)
        start = int((piece.labels != -100).argmax())
        prompt, completion = own.decode(piece.ids[:start].tolist()), piece.ids[start:-1].tolist()
        made.append(
            {"prompt": prompt, "completion": own.decode(completion), "label": piece.row_label == (1.0,)}
        )
    return made


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed")
def test_three_steps_give_the_weights_of_trls_trainer(tmp_path: Path) -> None:
    """Losses, KL terms, rewards and every weight, over the rows in the order in which the run takes them."""
    from trl import KTOConfig, KTOTrainer

    save_model(tmp_path / "model", vocab_size=258)
    settings = {"learning_rate": 0.02, "schedule": "constant", "weight_decay": 0.0, "eps": 1e-3,
                "betas": (0.9, 0.999)}  # fmt: skip
    keys = {"model": {"path": str(tmp_path / "model")}, "optimizer": settings}
    loss = {"kind": "kto", "desirable_weight": 1.5}
    made = with_rows(tmp_path, keys, steps=3, batch_size=ROWS, clip_norm=None, loss=loss)
    prepared = preflight(made)
    records = taken(prepared, 3 * ROWS)
    run(prepared)
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    reference, own = copy.deepcopy(trained), HuggingFace("bytes").own
    own.pad_token = own.eos_token
    options = {"desirable_weight": 1.5, "train_sampling_strategy": "sequential", "optim": "adamw_torch"}
    adam = {"learning_rate": 0.02, "weight_decay": 0.0, "adam_epsilon": 1e-3}
    arguments = trl_settings(KTOConfig, tmp_path / "trl", beta=0.1, **options, **adam)
    _, logs = trl_steps(KTOTrainer, arguments, trained, records, own, ref_model=reference)
    steps = [row for row in metrics(tmp_path) if "loss" in row]
    for row, log in zip(steps, logs, strict=True):
        assert row["loss"] == pytest.approx(log["loss"], rel=1e-4)
        for name in set(NAMES) & log.keys():
            assert row[name] == pytest.approx(log[name], rel=1e-3, abs=1e-5), name
    assert steps[-1]["kl"] > 0.01  # it mattered
    saved = {name.split()[1]: value for name, value in tensors(checkpoint(tmp_path, 3)).items()}
    for name, parameter in trained.named_parameters():
        torch.testing.assert_close(saved[name], parameter.detach(), rtol=1e-4, atol=2e-5)


def test_references_are_those_of_the_first_weights_and_the_kl_term_that_of_the_present_ones(
    tmp_path: Path,
) -> None:
    prepared = preflight(with_rows(tmp_path, {"model.dtype": "float64"}, batch_size=5))
    pipe = prepared.auto.build(prepared.model)
    data = with_references(prepared.data, prepared.config, pipe, "a run")
    whole = AutoModelForCausalLM.from_config(prepared.plan.source.model.config, dtype=torch.float64)
    whole.load_state_dict(dict(pipe.named_parameters()))
    batch: Any = data.batch(1)
    for part in (*batch.content, *batch.beside):
        expected = plain_logps(whole, part)[0].detach()
        torch.testing.assert_close(part["reference_logps"], expected, rtol=1e-10, atol=1e-10)
    content, beside = ([row for part in of for row in part["labels"]] for of in (batch.content, batch.beside))
    said, other = (sorted(row[row != -100].tolist() for row in of) for of in (content, beside))
    assert said == other  # the completions of the step


@pytest.mark.parametrize(
    "records", [pytest.param(rows(), marks=pytest.mark.sweep), None], ids=["rows", "pairs"]
)
def test_a_run_prefers_what_is_desirable_and_resumes_bit_for_bit(records: Any, tmp_path: Path) -> None:
    pairs = [{"prompt": "q" * (1 + at % 5), "chosen": "a" * (2 + at % 9), "rejected": "b" * (2 + at % 4)}
             for at in range(20)]  # fmt: skip
    made = with_rows(tmp_path, records=records or pairs, steps=4, checkpoint_every=2)
    run(preflight(made))
    said = metrics(tmp_path)
    steps = [row for row in said if "loss" in row]
    assert steps[0]["loss"] == pytest.approx(0.5, rel=1e-6)
    assert steps[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert max(row["kl"] for row in steps) > 0
    held_out = [row["held_out_loss"] for row in said if "held_out_loss" in row]
    assert held_out[-1] < held_out[0]
    assert {"held_out_kl", "held_out_logps/chosen"} <= said[0].keys()
    resumes_bit_for_bit(tmp_path, made, ("loss", "kl", "rewards/margins"))


def test_other_neighbours_get_references_of_their_own(tmp_path: Path) -> None:
    """Steps of another size pair other rows, so the file of references is not theirs."""
    prepared = preflight(with_rows(tmp_path, steps=2))
    pipe = prepared.auto.build(prepared.model)
    first = with_references(prepared.data, prepared.config, pipe, "a run").rows
    other = preflight(with_rows(tmp_path, steps=4, batch_size=6))
    second = with_references(other.data, other.config, pipe, "a run").rows
    again = with_references(prepared.data, prepared.config, pipe, "a run").rows
    assert first.references is not None
    assert second.references is not None
    assert first.neighbours is not None
    both = ~np.isnan(first.references[:, 0]) & ~np.isnan(second.references[:, 0])
    assert np.array_equal(first.references[both, 0], second.references[both, 0])
    changed = both & (first.neighbours != second.neighbours)
    assert changed.any()
    assert (first.references[changed, 1] != second.references[changed, 1]).all()
    assert again.references is not None
    assert np.array_equal(again.references, first.references, equal_nan=True)


@pytest.mark.parametrize("accumulate", some([1, 2], 2))
def test_a_mesh_trains_as_one_pipeline_does(accumulate: int, pool: Pool, tmp_path: Path) -> None:
    """Two pipelines of two ranks, nine rows a step: one has a row more than the other."""
    keys = {"train.batch_size": 9, "data.held_out": 0.3, "parallel.dp_replicate": 2, "train.check": "always",
            "train.accumulate": accumulate}  # fmt: skip
    made = with_rows(tmp_path, keys)
    rows_on_mesh = trains_as_alone(pool, tmp_path, made, ("held_out_kl", *NAMES))
    assert max(row.get("kl", 0) for row in rows_on_mesh) > 0


def test_a_metric_that_the_held_out_rows_do_not_give_is_refused_before_the_first_step(tmp_path: Path) -> None:
    """All rows are desirable, so there is no margin to the others."""
    keys = {"output.keep": {"metric": "held_out_rewards/margins", "best": 1}}
    made = with_rows(tmp_path, keys, records=[{**row, "label": True} for row in rows()])
    with refuses(ConfigError, "output.keep.metric=held_out_rewards/margins", "both kinds"):
        run(preflight(made))
    assert [row["step"] for row in metrics(tmp_path)] == [0]


def test_a_held_out_row_alone_is_refused(tmp_path: Path) -> None:
    """Its KL term would be its own log-ratio, and its loss the same at every evaluation."""
    (tmp_path / "one.jsonl").write_text(json.dumps(rows(1)[0]))
    with refuses(DataError, "1 held-out row", "another row"):
        preflight(with_rows(tmp_path, {"data.validation": {"path": str(tmp_path / "one.jsonl")}}))


def test_a_record_that_is_no_row_is_one_message(tmp_path: Path) -> None:
    for wrong, rule in (({"label": 1}, "and here is 1"), ({"prompt": 3}, "prompt")):
        made = with_rows(tmp_path, records=[*rows(), {**rows(1)[0], **wrong}])
        with refuses(DataError, "rows.jsonl line 41", rule):
            preflight(made)
