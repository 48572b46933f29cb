"""Configs as text: loaded, refused, and shown."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.train.config.load import load_config
from penstock.train.config.sections import TrainConfig
from penstock.yaml_reader import parse_yaml
from support.mutations import ODD_VALUES

MINIMAL = """
model: {config: {model_type: qwen3, hidden_size: 64}}
data: {path: text.txt, tokenizer: bytes}
"""


def loaded(tmp_path: Path, text: str = MINIMAL, *overrides: str) -> TrainConfig:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    return load_config(file, overrides)


def refused(tmp_path: Path, text: str = MINIMAL, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, text, *overrides)
    assert caught.value.exit_code == 2
    assert caught.value.value
    assert caught.value.rule
    assert caught.value.remedy
    return str(caught.value)


def same_as_yaml(config: TrainConfig) -> TrainConfig:
    """`config`, which its own YAML gives again."""
    assert TrainConfig.model_validate(parse_yaml(config.to_yaml())) == config
    return config


def pair(choices: random.Random, keys: list[str], good: list[tuple[str, Any]]) -> tuple[str, Any]:
    """A key, which mostly exists, and a value."""
    if choices.random() < 0.6:
        return choices.choice(good)
    key = choices.choice(keys)
    if choices.random() < 0.1:
        key += choices.choice((".x", "s", "..", ".", " ", "é", "-"))
    return key, choices.choice([*ODD_VALUES, 4, 8, 64, 0.1, 1e-3, "auto", "bytes", [8, 8], {"multiple": 8}])
