"""penstock import: files of other trainers become configs that load."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.train.config.load import load_config
from support.command import Command

TRL = """# how we train
trl sft \\
    --model_name_or_path 'Qwen/Qwen2-0.5B' \\
    --dataset_name chats.jsonl --learning_rate 2.0e-5 --per_device_train_batch_size 4
"""


def test_a_yaml_file(tmp_path: Path, penstock: Command) -> None:
    theirs, ours = tmp_path / "axolotl.yaml", tmp_path / "train.yaml"
    theirs.write_text(
        "base_model: mine\ndatasets: [{path: chats.jsonl}]\nmicro_batch_size: 2\nhub_strategy: end\n"
    )
    code, out, err = penstock("import", theirs, "--gpus", "4", "--out", ours)
    assert (code, err) == (0, "")
    assert "no counterpart: hub_strategy: end\n" in out
    config = load_config(ours)
    assert (config.pipeline.ranks, config.train.batch_size) == (4, 8)


def test_a_command_line(tmp_path: Path, penstock: Command) -> None:
    theirs = tmp_path / "run.sh"
    theirs.write_text(TRL)
    code, out, err = penstock("import", theirs)
    assert (code, err) == (0, "")
    (tmp_path / "train.yaml").write_text(out)
    config = load_config(tmp_path / "train.yaml")
    assert (config.model.path, config.data.path, config.train.batch_size) == (
        "Qwen/Qwen2-0.5B",
        "chats.jsonl",
        4,
    )


@pytest.mark.parametrize(
    ("name", "text", "word"),
    [
        ("x.yaml", "[1, 2]", "it holds keys"),
        ("x.yaml", "a: [", "not YAML"),
        ("x.sh", "trl sft --model_name_or_path 'open", "no shell reads it"),
        ("x.sh", "", "base_model"),
        ("x.yaml", "base_model: ''", "model.path"),
    ],
)
def test_what_cannot_be_read_is_refused(
    name: str, text: str, word: str, tmp_path: Path, penstock: Command
) -> None:
    (tmp_path / name).write_text(text)
    code, _, err = penstock("import", tmp_path / name)
    assert code == 2
    assert word in err
    assert "Traceback" not in err


def test_no_file_and_a_file_in_the_way(tmp_path: Path, penstock: Command) -> None:
    assert penstock("import", tmp_path / "none.sh").code == 2
    (tmp_path / "run.sh").write_text(TRL)
    code, _, err = penstock("import", tmp_path / "run.sh", "--out", tmp_path / "run.sh")
    assert code == 2
    assert "there is a file" in err
