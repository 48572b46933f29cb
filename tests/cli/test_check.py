"""penstock check: what it prints, and its exit code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedModel

from penstock import AutoPipeline
from penstock.batch.loss import NextToken
from penstock.cli import check as command
from penstock.cli.check import batch_shape, needed_bytes, random_batch, refuse_too_large
from penstock.pipeline.building import build_stages
from penstock.schedule import build, dump
from support.command import Command
from support.covering import every
from support.families import tiny_config, tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models") / "llama"
    tiny_model("llama", tied=True).save_pretrained(made)
    return made


@pytest.mark.parametrize(
    "options",
    every(2, [
        [],
        ["--ranks", "2", "--schedule", "zb_v", "--microbatches", "6", "--dtype", "float64"],
        ["--ranks", "2", "--stages-per-rank", "2", "--rows", "11", "--length", "17", "--dtype", "bfloat16"],
        ["--ranks", "2", "--layout", "Ettt|tL", "--microbatches", "3", "--tolerance", "1e-4"],
    ]),
)  # fmt: skip
def test_a_folder_with_weights_passes(folder: Path, penstock: Command, options: list[str]) -> None:
    code, out, err = penstock("check", folder, *options)
    assert (code, err) == (0, "")
    assert out.startswith("LlamaForCausalLM in ")
    for text in ("its weights\n", "stage  rank  layers", " split, ", " whole\n", "compared, each entry"):
        assert text in out
    assert out.endswith("\npass\n")


def test_a_config_alone_gets_random_weights_and_rows_beyond_its_window(
    tmp_path: Path, penstock: Command
) -> None:
    tiny_config("gemma2").save_pretrained(tmp_path)
    code, out, _ = penstock("check", tmp_path, "--ranks", "2")
    assert code == 0
    assert "random weights (seed 0): the folder has none" in out
    assert "longer than the sliding window of" in out


def test_an_encoder_is_refused(tmp_path: Path, penstock: Command) -> None:
    """0.5.0: a BERT folder passed: transformers makes a causal LM of it, whose tokens see those after."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
             "num_attention_heads": 2}  # fmt: skip
    config = AutoConfig.for_model("bert", architectures=["BertLMHeadModel"], **sizes)
    config.save_pretrained(tmp_path)
    code, _, err = penstock("check", tmp_path, "--ranks", "2")
    assert code == 2
    assert "model_type='bert' (BertLMHeadModel) with is_decoder=False: it is an encoder" in err


def test_a_schedule_may_come_from_a_file(folder: Path, tmp_path: Path, penstock: Command) -> None:
    dump(build("zb_h1", ranks=2, microbatches=3), tmp_path / "own.json")
    code, out, _ = penstock("check", folder, "--schedule", tmp_path / "own.json")
    assert code == 0
    assert "2 stages on 2 ranks, 3 microbatches" in out
    assert "\nNCCL: 1 communicator a rank, for all messages" in out


# the stages alone are spoilt as _Build._model makes them
def test_gradients_that_differ_are_listed_worst_first_and_not_all(
    folder: Path, monkeypatch: pytest.MonkeyPatch, penstock: Command
) -> None:
    model_of = build_stages.StagesBuild._model

    def off(self: build_stages.StagesBuild, stage: int) -> PreTrainedModel:
        """Every gradient of the second stage's layers is too large."""
        model = model_of(self, stage)
        for name, parameter in model.named_parameters():
            if stage == 1 and ".layers." in name:
                parameter.register_hook(lambda grad: grad * 1.5)
        return model

    monkeypatch.setattr(build_stages.StagesBuild, "_model", off)
    monkeypatch.setattr(command, "SHOWN", 5)
    code, out, _ = penstock("check", folder, "--ranks", "2")
    assert code == 1
    rows = [line for line in out.splitlines() if ".layers." in line]
    assert len(rows) == 5
    assert all("model.layers.2." in row or "model.layers.3." in row for row in rows)
    for text in ("gradients that differ, the worst first", "and 13 more\n", "fail: 18 tensors differ, "):
        assert text in out
    assert "pass" not in out


def replace_whole_model(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], None]) -> None:
    whole_model = command.whole_model

    def changed(*arguments: Any) -> PreTrainedModel:
        model = whole_model(*arguments)
        with torch.no_grad():
            change(model)
        return model

    monkeypatch.setattr(command, "whole_model", changed)


def test_weights_that_differ_are_listed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, penstock: Command
) -> None:
    replace_whole_model(monkeypatch, lambda model: model.model.norm.weight[0].add_(1))
    code, out, _ = penstock("check", folder, "--ranks", "2")
    assert code == 1
    assert "weights, before any step that differ, the worst first" in out
    assert "model.norm.weight" in out
    assert "fail: 1 tensors differ\n" in out


def test_a_model_that_fails_by_itself_is_no_wrong_split(
    folder: Path, monkeypatch: pytest.MonkeyPatch, penstock: Command
) -> None:
    """Experts on the CPU in float64, say."""
    replace_whole_model(monkeypatch, lambda model: setattr(model, "lm_head", torch.nn.Linear(1, 1)))
    code, _, err = penstock("check", folder, "--ranks", "2")
    assert code == 2
    assert "LlamaForCausalLM in float32: the whole model itself fails on the CPU: " in err


BAD = {
    "an unknown schedule": (["--schedule", "2f2b"], "schedule '2f2b'"),
    "no backward": (["--schedule", "inference"], "--schedule inference: it holds no backward"),
    "too few rows": (["--rows", "3"], "--rows 3: each of 8 microbatches needs a row. Give 8 or more"),
    "too long": (["--length", "4000"], "--length 4000: the model takes 64 positions"),
    "too short": (["--length", "1"], "--length 1: the first token of a row predicts nothing"),
    "no tolerance": (["--tolerance", "0"], "--tolerance 0.0: it is a difference relative to"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_wrong_options_end_with_2_and_one_error(folder: Path, penstock: Command, case: str) -> None:
    options, message = BAD[case]
    code, out, err = penstock("check", folder, *options)
    assert (code, out) == (2, "")
    assert err.startswith("penstock: error: ")
    assert message in err
    assert err.count("penstock: error") == 1


def test_a_model_that_is_not_there_is_refused(penstock: Command) -> None:
    code, _, err = penstock("check", "nowhere")
    assert code == 2
    assert "model folder nowhere: there is no such folder. Give the path" in err


def test_a_model_that_does_not_fit_is_refused_with_numbers(
    folder: Path, monkeypatch: pytest.MonkeyPatch, penstock: Command
) -> None:
    monkeypatch.setattr(command, "free_memory", lambda: 100_000)
    code, _, err = penstock("check", folder, "--ranks", "2")
    assert code == 2
    assert "for weights and gradients, and " in err
    assert "97.7 KiB of memory are free. Check a copy of its config.json with fewer layers" in err


def test_the_memory_of_both_models_is_estimated() -> None:
    model = tiny_model("llama")
    auto = AutoPipeline(ranks=2, microbatches=4)
    plan = auto.build_plan(model)
    fixed, activations = needed_bytes(auto, plan, (5, 32))
    sizes = [parameter.nbytes for parameter in model.parameters()]
    assert fixed == 4 * sum(sizes) + 2 * max(sizes)
    assert activations is not None
    assert activations > 0
    refuse_too_large(auto, plan, (5, 32), free=None)  # where it cannot be known, nothing is refused


def test_the_batch_is_always_the_same_uneven_and_partly_labelled() -> None:
    model = tiny_model("llama")
    shape = batch_shape(model, 4)
    assert shape == (5, 32)
    first, second = (random_batch(model, shape, NextToken()) for _ in range(2))
    assert torch.equal(first["input_ids"], second["input_ids"])
    counts = (first["labels"] != -100).sum(1).tolist()
    assert 0 < counts[0] < min(counts[1:])
    assert max(counts) < 32
