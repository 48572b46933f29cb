"""Training on preferences: the gradients of one process, the reference of the first weights, and resuming."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from penstock.errors import DataError
from penstock.train.config.sections import TrainConfig
from penstock.train.preference import with_references
from penstock.train.preflight import preflight
from penstock.train.run import run
from support.covering import some
from support.pairs import plain_gradients, plain_logps
from support.pool import Pool
from support.reference import assert_gradients, gradients_of
from support.refusals import refuses
from support.same_runs import resumes_bit_for_bit, trains_as_alone
from support.tiny import QWEN3, config, metrics, save_model

MODEL = {**QWEN3, "vocab_size": 258}


def preferences(folder: Path, count: int = 40) -> str:
    """Prompts and completions of several lengths."""
    rows = [
        {"prompt": "q" * (1 + at % 5), "chosen": "a" * (1 + at % 9), "rejected": "b" * (1 + at % 4)}
        for at in range(count)
    ]
    (folder / "out").mkdir(exist_ok=True)
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(folder / "pairs.jsonl")


def with_pairs(folder: Path, keys: dict[str, Any] | None = None, **train: Any) -> TrainConfig:
    data = {"path": preferences(folder), "kind": "preference", "sequence_length": 64, "held_out": 0.2}
    keys = {f"data.{key}": value for key, value in data.items()} | (keys or {})
    return config(folder, MODEL, keys, **{"loss": "dpo", **train})


def test_every_gradient_is_that_of_the_mean_over_pairs(tmp_path: Path) -> None:
    prepared = preflight(with_pairs(tmp_path, {"model.dtype": "float64"}, batch_size=5))
    pipe = prepared.auto.build(prepared.model)
    data = with_references(prepared.data, prepared.config, pipe, "a run")
    batch: Any = data.batch(1).content
    assert [len(part["input_ids"]) for part in batch] == [6, 4]
    whole = AutoModelForCausalLM.from_config(prepared.plan.source.model.config, dtype=torch.float64)
    whole.load_state_dict(dict(pipe.named_parameters()))
    reference = [plain_logps(whole, part)[0].detach() for part in batch]
    for part, expected in zip(batch, reference, strict=True):
        torch.testing.assert_close(part["reference_logps"], expected, rtol=1e-10, atol=1e-10)
        part["reference_logps"] = part["reference_logps"] + torch.linspace(-1, 1, len(expected))

    def formula() -> Tensor:
        ratios = torch.cat([plain_logps(whole, part)[0] - part["reference_logps"] for part in batch])
        return -F.logsigmoid(0.1 * (ratios[::2] - ratios[1::2])).mean()

    expected_loss, gradients = plain_gradients(whole, formula)
    result = pipe.step(batch)
    assert result.tokens == 5
    assert result.loss == pytest.approx(expected_loss, rel=1e-12)
    assert_gradients(gradients_of(pipe), gradients, 1e-10)


@pytest.mark.parametrize(
    "loss",
    some(["dpo", {"kind": "dpo", "variant": "ipo"}, "orpo", {"kind": "simpo", "beta": 1.0}], "dpo", "orpo"),
)
def test_a_run_prefers_what_was_chosen_and_resumes_bit_for_bit(tmp_path: Path, loss: Any) -> None:
    made = with_pairs(tmp_path, steps=4, checkpoint_every=2, loss=loss)
    run(preflight(made))
    rows = metrics(tmp_path)
    steps = [row for row in rows if "rewards/margins" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert steps[-1]["rewards/margins"] > steps[0]["rewards/margins"]
    if loss == "dpo":
        assert rows[0]["held_out_rewards/margins"] == 0
        assert steps[0]["loss"] == pytest.approx(0.6931471, rel=1e-5)
        assert steps[0]["rewards/margins"] == 0
    held_out = [row["held_out_loss"] for row in rows if "held_out_loss" in row]
    assert held_out[-1] < held_out[0]
    margins = [row["held_out_rewards/margins"] for row in rows if "held_out_loss" in row]
    assert margins[-1] > margins[0]
    resumes_bit_for_bit(tmp_path, made)


def test_the_reference_of_an_adapter_is_its_base(tmp_path: Path) -> None:
    save_model(tmp_path / "base", vocab_size=258)
    keys = {"model": {"path": str(tmp_path / "base")}, "adapter.r": 2}
    prepared = preflight(with_pairs(tmp_path, keys))
    pipe = prepared.auto.build(prepared.model)
    for name, parameter in pipe.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    data = with_references(prepared.data, prepared.config, pipe, "a run")
    batch: Any = data.batch(1).content
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    for part in batch:
        expected = plain_logps(base, part)[0].detach()
        torch.testing.assert_close(part["reference_logps"].float(), expected, rtol=1e-5, atol=1e-5)
        assert float((pipe.logprobs(part) - expected).abs().max()) > 0.01


def test_a_resumed_run_reads_the_file_and_computes_what_it_lacks(tmp_path: Path) -> None:
    prepared = preflight(with_pairs(tmp_path, steps=2))
    pipe = prepared.auto.build(prepared.model)
    first = with_references(prepared.data, prepared.config, pipe, "a run").rows.references
    assert first is not None
    assert 0 < int(np.isnan(first[:, 0]).sum()) < len(first)
    with torch.no_grad():
        for parameter in pipe.parameters():
            parameter.add_(0.1)
    longer = preflight(with_pairs(tmp_path, steps=4))
    second = with_references(longer.data, longer.config, pipe, "a run").rows.references
    assert second is not None
    known = ~np.isnan(first)
    assert np.array_equal(second[known], first[known])
    assert int(np.isnan(second).sum()) < int(np.isnan(first).sum())
    other = with_references(prepared.data, prepared.config, pipe, "another run").rows.references
    assert other is not None
    assert not np.array_equal(other[known], first[known])


@pytest.mark.parametrize(
    "damage", [b"", b"PK\x03\x04 not an archive", None], ids=["empty", "no archive", "cut"]
)
def test_a_damaged_file_of_references_is_made_anew(damage: bytes | None, tmp_path: Path) -> None:
    prepared = preflight(with_pairs(tmp_path, steps=2))
    pipe = prepared.auto.build(prepared.model)
    first = with_references(prepared.data, prepared.config, pipe, "a run").rows.references
    file = tmp_path / "out" / "reference_logps.npz"
    file.write_bytes(file.read_bytes()[:-40] if damage is None else damage)
    again = with_references(prepared.data, prepared.config, pipe, "a run").rows.references
    assert first is not None
    assert again is not None
    assert np.array_equal(first, again, equal_nan=True)


def test_fewer_held_out_pairs_than_pipelines_are_refused(tmp_path: Path) -> None:
    """No pair can stand in for a missing one: each would count in the loss."""
    data = preflight(with_pairs(tmp_path)).data
    few = replace(data, parts=len(data.held_out) + 1, part=0)
    with refuses(DataError, "held-out rows on a mesh of"):
        few.held_out_batches(4)


def test_a_mesh_trains_as_one_pipeline_does(pool: Pool, tmp_path: Path) -> None:
    """Two pipelines of two ranks, seven pairs a step: one has a pair more than the other."""
    keys = {"train.batch_size": 7, "data.held_out": 0.3, "parallel.dp_replicate": 2, "train.check": "always"}
    made = with_pairs(tmp_path, keys)
    trains_as_alone(pool, tmp_path, made, ("rewards/margins", "logps/chosen", "rewards/accuracies"))


def test_the_split_is_checked_with_whole_pairs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run(preflight(with_pairs(tmp_path, steps=1, check="always")))
    assert "gradients equal the whole one's" in capfd.readouterr().out
