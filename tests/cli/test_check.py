"""penstock check: what it prints, and with which code it ends."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from penstock import AutoPipeline
from penstock.cli import check as command
from penstock.cli.check import batch_shape, needed_bytes, random_batch
from penstock.cli.main import main
from penstock.pipeline import auto_pipeline
from support.families import tiny_config, tiny_model


def penstock(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    """Run the command in this process; its exit code."""
    monkeypatch.setattr(sys, "argv", ["penstock", "check", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models") / "llama"
    tiny_model("llama", tied=True).save_pretrained(made)
    return made


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--ranks", "2", "--schedule", "zb_v", "--microbatches", "6", "--dtype", "float64"],
        ["--ranks", "2", "--stages-per-rank", "2", "--rows", "11", "--length", "17"],
        ["--ranks", "2", "--layout", "Ettt|tL", "--microbatches", "3", "--tolerance", "1e-4"],
        ["--ranks", "2", "--dtype", "bfloat16"],
    ],
)
def test_a_folder_with_weights_passes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    assert penstock(monkeypatch, folder, *options) == 0
    told = capsys.readouterr()
    assert told.out.startswith("LlamaForCausalLM in ")
    for part in (
        "its weights\n",
        "stage  rank  layers",
        " split, ",
        " whole\n",
        "compared, each entry",
        "\npass\n",
    ):
        assert part in told.out
    assert told.err == ""


def test_a_config_alone_gets_random_weights_and_rows_beyond_its_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_config("gemma2").save_pretrained(tmp_path)
    assert penstock(monkeypatch, tmp_path, "--ranks", "2") == 0
    told = capsys.readouterr().out
    assert "random weights (seed 0): the folder has none" in told
    assert "longer than the sliding window of" in told


def test_a_schedule_from_a_file(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from penstock.schedule import build, dump

    dump(build("zb_h1", ranks=2, microbatches=3), tmp_path / "own.json")
    assert penstock(monkeypatch, folder, "--schedule", tmp_path / "own.json") == 0
    assert "2 stages on 2 ranks, 3 microbatches" in capsys.readouterr().out


def broken(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    """Every gradient of the second stage's layers is off."""
    made = auto_pipeline._Build._model

    def off(self: auto_pipeline._Build, index: int) -> PreTrainedModel:
        part = made(self, index)
        for name, parameter in part.named_parameters():
            if index == 1 and ".layers." in name:
                parameter.register_hook(lambda grad: grad * factor)
        return part

    monkeypatch.setattr(auto_pipeline._Build, "_model", off)


def test_tensors_that_differ_are_listed_worst_first_and_not_all(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken(monkeypatch, 1.5)
    monkeypatch.setattr(command, "SHOWN", 5)
    assert penstock(monkeypatch, folder, "--ranks", "2") == 1
    told = capsys.readouterr().out
    rows = [line for line in told.splitlines() if ".layers." in line]
    assert len(rows) == 5
    assert all("model.layers.2." in row or "model.layers.3." in row for row in rows)
    assert "gradients that differ, the worst first" in told
    assert "and 13 more\n" in told
    assert "fail: 18 tensors differ, " in told
    assert "pass" not in told


def test_weights_that_differ_are_listed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole_model = command.whole_model

    def other(*given: Any) -> PreTrainedModel:
        model = whole_model(*given)
        with torch.no_grad():
            model.model.norm.weight[0] += 1
        return model

    monkeypatch.setattr(command, "whole_model", other)
    assert penstock(monkeypatch, folder, "--ranks", "2") == 1
    told = capsys.readouterr().out
    assert "weights, before any step that differ, the worst first" in told
    assert "model.norm.weight" in told
    assert "fail: 1 tensors differ\n" in told


BAD = {
    "no such folder": (["nowhere"], "model folder nowhere: there is no such folder. Give the path"),
    "too many ranks": (["--ranks", "9"], "9 stages for 4 layers"),
    "an unknown schedule": (["--schedule", "2f2b"], "schedule '2f2b'"),
    "no backward": (["--schedule", "inference"], "--schedule inference: it holds no backward"),
    "too few rows": (["--rows", "3"], "--rows 3: each of 8 microbatches has a row at least. Give 8 or more"),
    "too long": (["--length", "4000"], "--length 4000: the model takes 64 positions"),
    "too short": (["--length", "1"], "--length 1: the first token of a row predicts nothing"),
    "no tolerance": (["--tolerance", "0"], "--tolerance 0.0: it is a difference relative to"),
    "a wrong layout": (["--layout", "Et|x"], "layout"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_is_refused_ends_with_2_and_one_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    options, message = BAD[case]
    given = options if case == "no such folder" else [folder, *options]
    assert penstock(monkeypatch, *given) == 2
    told = capsys.readouterr()
    assert told.err.startswith("penstock: error: ")
    assert message in told.err
    assert told.err.count("penstock: error") == 1
    assert told.out == ""


def test_a_model_that_is_no_chain_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    assert penstock(monkeypatch, tmp_path) == 2
    assert "model_type='t5'" in capsys.readouterr().err


def test_a_model_that_does_not_fit_is_refused_with_numbers(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "free_memory", lambda: 100_000)
    assert penstock(monkeypatch, folder, "--ranks", "2") == 2
    told = capsys.readouterr().err
    assert "for weights and gradients, and " in told
    assert "97.7 KiB of memory are free. Check a copy of its config.json with fewer layers" in told
    monkeypatch.setattr(command, "free_memory", lambda: None)
    assert penstock(monkeypatch, folder, "--ranks", "2") == 0


def test_what_both_models_hold_is_estimated() -> None:
    model = tiny_model("llama")
    auto = AutoPipeline(ranks=2, microbatches=4)
    fixed, activations = needed_bytes(auto, auto.build_plan(model), (5, 32))
    held = sum(p.nbytes for p in model.parameters())
    largest = max(p.nbytes for p in model.parameters())
    assert fixed == 4 * held + 2 * largest
    assert activations is not None
    assert activations > 0


def test_a_model_that_fails_by_itself_is_told_apart_from_a_wrong_split(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Experts on the CPU in float64, say."""

    def fails(*given: Any) -> PreTrainedModel:
        model = tiny_model("llama", tied=True)
        model.lm_head = torch.nn.Linear(1, 1)
        return model

    monkeypatch.setattr(command, "whole_model", fails)
    assert penstock(monkeypatch, folder, "--ranks", "2") == 2
    assert "LlamaForCausalLM in float32: the whole model itself fails on the CPU: " in capsys.readouterr().err


def test_the_batch_is_always_the_same_uneven_and_partly_labelled() -> None:
    model = tiny_model("llama")
    shape = batch_shape(model, 4)
    assert shape == (5, 32)
    first, second = random_batch(model, shape), random_batch(model, shape)
    assert torch.equal(first["input_ids"], second["input_ids"])
    counts = (first["labels"] != -100).sum(1).tolist()
    assert 0 < counts[0] < min(counts[1:])
    assert max(counts) < 32


def test_help_says_what_it_does(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert penstock(monkeypatch, "--help") == 0
    told = capsys.readouterr().out
    assert "Check that a model, split into stages" in told
    assert "--stages-per-rank" in told
