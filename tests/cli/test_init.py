"""penstock init: a config that runs, from four answers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import typer

from penstock.cli import init as command
from penstock.train.config.load import load_config
from support.command import Command
from support.tiny import checkpoint, save_model

GIVEN = ("--model", "Qwen/Qwen3-8B", "--data", "chats.jsonl", "--gpus", "4", "--goal", "sft")


def test_the_options_become_a_config(tmp_path: Path, penstock: Command) -> None:
    out = tmp_path / "run.yaml"
    code, printed, err = penstock("init", *GIVEN, "--out", out)
    assert (code, err) == (0, "")
    assert f"penstock train {out} --dry-run" in printed
    config = load_config(out)
    assert (config.model.path, config.data.path, config.data.kind) == ("Qwen/Qwen3-8B", "chats.jsonl", "chat")
    assert (config.pipeline.ranks, config.output.folder) == (4, "runs/run")


@pytest.mark.parametrize("option", ["--model", "--data", "--gpus", "--goal"])
def test_without_a_terminal_each_option_is_needed(option: str, tmp_path: Path, penstock: Command) -> None:
    at = GIVEN.index(option)
    out = tmp_path / "run.yaml"
    code, _, err = penstock("init", *GIVEN[:at], *GIVEN[at + 2 :], "--out", out)
    assert code == 2
    assert f"penstock init without {option}" in err
    assert not out.exists()


def test_a_file_is_not_overwritten(tmp_path: Path, penstock: Command) -> None:
    out = tmp_path / "run.yaml"
    out.write_text("mine")
    code, _, err = penstock("init", *GIVEN, "--out", out)
    assert code == 2
    assert "there is a file" in err
    assert out.read_text() == "mine"


def test_no_process_is_refused(tmp_path: Path, penstock: Command) -> None:
    code, _, err = penstock("init", *GIVEN[:5], "0", *GIVEN[6:], "--out", tmp_path / "run.yaml")
    assert code == 2
    assert "--gpus 0" in err


def test_a_terminal_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"What for?": "pretrain", "Model": "models/mine", "Data": "book.txt", "How many": "2"}
    asked: list[str] = []

    def prompt(question: str, type: object) -> object:
        asked.append(question)
        text = next(answer for begin, answer in answers.items() if question.startswith(begin))
        assert callable(type)
        return type(text)

    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(typer, "prompt", prompt)
    command.init(tmp_path / "run.yaml", None, None, None, None)
    config = load_config(tmp_path / "run.yaml")
    assert len(asked) == 4
    assert (config.model.path, config.data.kind, config.pipeline.ranks) == ("models/mine", "auto", 2)


def test_the_config_trains(tmp_path: Path, penstock: Command) -> None:
    """With a folder and texts of our own; only steps and lengths are made smaller."""
    save_model(tmp_path / "model")
    (tmp_path / "book.txt").write_text("To be, or not to be, that is the question. " * 200)
    out = tmp_path / "run.yaml"
    given = (
        "--model",
        tmp_path / "model",
        "--data",
        tmp_path / "book.txt",
        "--gpus",
        "1",
        "--goal",
        "pretrain",
    )
    assert penstock("init", *given, "--out", out).code == 0
    shorter = ("train.steps=2", "data.sequence_length=16", "data.tokenizer=bytes", "train.check=off")
    folder = f"output.folder={tmp_path / 'out'}"
    code, _, err = penstock("train", out, *shorter, folder, "train.device=cpu")
    assert code == 0, err
    assert checkpoint(tmp_path, 2).is_dir()
