"""A first config: keys that fit the model and the number of processes, each below what it means."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest

from penstock.errors import ConfigError
from penstock.train.config.load import load_config
from penstock.train.config.sections import TrainConfig
from penstock.train.config.starter import GOALS, FirstRun, Goal, starter
from support.refusals import refuses


def loaded(start: FirstRun, folder: Path) -> TrainConfig:
    (folder / "train.yaml").write_text(starter(start))
    return load_config(folder / "train.yaml")


@pytest.mark.parametrize("gpus", [1, 2, 3, 8, 12, 13, 64])
@pytest.mark.parametrize("goal", get_args(Goal))
def test_every_number_of_processes_gets_a_mesh_and_rows_for_it(goal: Goal, gpus: int, tmp_path: Path) -> None:
    config = loaded(FirstRun("Qwen/Qwen3-8B", "data.jsonl", gpus, goal), tmp_path)
    assert config.pipeline.ranks * config.parallel.axes.ranks_per_stage == gpus
    assert (config.adapter is not None) == (goal == "lora")
    assert config.data.kind == ("auto" if goal == "pretrain" else "chat")


def test_a_local_models_layers_and_positions_are_kept_to(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"num_hidden_layers": 3, "max_position_embeddings": 512})
    )
    config = loaded(FirstRun(str(tmp_path), "data.jsonl", 8, "sft"), tmp_path)
    assert (config.pipeline.ranks, config.parallel.dp_shard, config.data.sequence_length) == (2, 4, 512)


def test_of_a_model_with_towers_the_text_models_are(tmp_path: Path) -> None:
    keys = {"model_type": "qwen2_vl", "text_config": {"num_hidden_layers": 2, "max_position_embeddings": 64}}
    (tmp_path / "config.json").write_text(json.dumps(keys))
    config = loaded(FirstRun(str(tmp_path), "data.jsonl", 4, "sft"), tmp_path)
    assert (config.pipeline.ranks, config.data.sequence_length) == (2, 64)


@pytest.mark.parametrize("text", ["not JSON", "[]", '{"text_config": null}'])
def test_a_config_json_that_says_nothing_changes_nothing(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    assert loaded(FirstRun(str(tmp_path), "data.jsonl", 4, "sft"), tmp_path).pipeline.ranks == 4


def test_each_key_stands_below_what_it_means() -> None:
    lines = starter(FirstRun("models/mine", "data.jsonl", 4, "lora"), "mine.yaml").splitlines()
    assert "penstock train mine.yaml --dry-run" in "\n".join(lines)
    keys = [at for at, line in enumerate(lines) if line.startswith("  ") and not line.startswith("  #")]
    assert len(keys) > 10
    assert all(lines[at - 1].startswith("  # ") for at in keys)
    assert max(map(len, lines)) <= 110


def test_what_cannot_be_is_refused() -> None:
    with refuses(ConfigError, "--gpus 0", rule="at least one process"):
        starter(FirstRun("models/mine", "data.jsonl", 0, "sft"))
    with refuses(ConfigError, "--goal 'win'"):
        starter(FirstRun("models/mine", "data.jsonl", 1, "win"))  # type: ignore[arg-type]
    with refuses(ConfigError, "data.path", rule=""):
        starter(FirstRun("models/mine", "", 1, "sft"))
    assert set(GOALS) == set(get_args(Goal))
