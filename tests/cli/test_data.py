"""penstock data show: totals, and rows in which what counts is marked."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from penstock.cli import data as command
from support.command import Command
from support.tiny import QWEN3, config_file

CHAT = {"messages": [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "It is 5."}]}


def chats(folder: Path, **keys: Any) -> Path:
    lines = "".join(json.dumps(row) + "\n" for row in [CHAT] * 12 + [{"messages": CHAT["messages"][:1]}])
    (folder / "chats.jsonl").write_text(lines)
    model = {"config": {**QWEN3, "vocab_size": 258}}
    data = {"path": str(folder / "chats.jsonl"), "kind": "chat", "sequence_length": 64, "unanswered": "drop"}
    return config_file(folder, model=model, data=data | keys)


def test_totals_and_rows_are_shown(tmp_path: Path, penstock: Command) -> None:
    code, out, err = penstock("data", "show", chats(tmp_path), "--rows", "2")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert re.split(r"\s{2,}", lines[0].strip()) == [
        "source", "documents", "tokens", "counted", "dropped", "median", "longest", "overlong", "rows",
        "held out",
    ]  # fmt: skip
    numbers = re.split(r"\s{2,}", lines[2].strip())[1:]
    assert numbers == ["12", "420", "25.7%", "1", "35", "35", "0", "8", "4"]
    assert out.count("tokens, the loss counts 9") == 2
    assert "<|im_start|>assistant\n[[It is 5.<|im_end|>]]\n" in out


def test_a_terminal_gets_colours(tmp_path: Path, penstock: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def terminal(**_: object) -> Console:
        return Console(force_terminal=True, color_system="standard", highlight=False, width=500)

    monkeypatch.setattr(command, "Console", terminal)
    code, out, _ = penstock("data", "show", chats(tmp_path), "--rows", "1")
    assert code == 0
    assert "\x1b[1;32mIt is 5.<|im_end|>\x1b[0m" in out


def test_a_stream_is_shown_too_and_errors_have_their_line(tmp_path: Path, penstock: Command) -> None:
    validation = {"path": str(tmp_path / "chats.jsonl")}
    file = chats(tmp_path, streaming={"buffer": 1}, validation=validation)
    code, out, _ = penstock("data", "show", file, "--rows", "1")
    assert code == 0
    assert "[[It is 5.<|im_end|>]]" in out
    code, out, err = penstock("data", "show", file, "data.unanswered=refuse")
    assert code == 2
    assert "chats.jsonl line 13: it has no token that the loss counts" in err


def labelled(folder: Path, kind: str, record: dict[str, Any]) -> Path:
    (folder / "records.jsonl").write_text((json.dumps(record) + "\n") * 12)
    head = "Sequence" if kind == "classification" else "Token"
    model = {**QWEN3, "architectures": [f"Qwen3For{head}Classification"], "pad_token_id": 0}
    model["id2label"] = {"0": "low", "1": "high"}
    data = {"path": str(folder / "records.jsonl"), "kind": kind}
    return config_file(folder, model={"config": model}, data=data)


def test_a_completion_is_shown_with_its_label(tmp_path: Path, penstock: Command) -> None:
    rows = [{"prompt": "ab", "completion": "cd", "label": label} for label in (True, False) * 20]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    keys = {"path": str(tmp_path / "rows.jsonl"), "kind": "unpaired", "tokenizer": "bytes"}
    model = {"config": {**QWEN3, "vocab_size": 258}}
    file = config_file(tmp_path, data=keys, model=model, train={"loss": "kto"})
    code, out, _ = penstock("data", "show", file, "--rows", "8")
    assert code == 0
    for label in ("desirable", "undesirable"):
        assert f": 5 tokens, {label}, the loss counts 3\nab[[cd" in out


def test_labels_are_shown_by_their_names(tmp_path: Path, penstock: Command) -> None:
    file = labelled(tmp_path, "classification", {"text": "abc", "label": 1})
    code, out, err = penstock("data", "show", file, "--rows", "1")
    assert (code, err) == (0, "")
    assert "row 0: 3 tokens, label high\nabc\n" in out
    file = labelled(tmp_path, "token_classification", {"words": ["ab", "c"], "labels": [1, "low"]})
    code, out, err = penstock("data", "show", file, "--rows", "1")
    assert (code, err) == (0, "")
    assert "row 0: 4 tokens, the loss counts 2\n[[a high]]b [[c low]]\n" in out
