"""The keys of a config that say which layers each stage holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.train.config.load import load_config
from penstock.train.settings import make_auto

CONFIG = """
model: {config: {model_type: qwen3, hidden_size: 64}}
data: {path: text.txt, tokenizer: bytes}
train: {device: cpu}
pipeline: {ranks: 2, PIPELINE}
"""


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ('layout: "Et|tL"', {"layout": "Et|tL"}),
        ("layers_per_stage: 4", {"layers_per_stage": 4}),
        ("layers_per_stage: [4, 3]", {"layers_per_stage": (4, 3)}),
        ("first_stage_layers: 0, last_stage_layers: 3", {"first_stage_layers": 0, "last_stage_layers": 3}),
        ("modules_per_stage: [[a, b], [c]]", {"modules_per_stage": (("a", "b"), ("c",))}),
    ],
)
def test_keys_of_the_config_file(tmp_path: Path, keys: str, expected: dict[str, Any]) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG.replace("PIPELINE", keys))
    config = load_config(tmp_path / "config.yaml")
    auto = make_auto(config)
    assert {name: getattr(auto, name) for name in expected} == expected
    (tmp_path / "again.yaml").write_text(config.to_yaml())
    assert load_config(tmp_path / "again.yaml") == config


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("layers_per_stage: 0", "0 is neither a number of layers nor a list"),
        ("layers_per_stage: [1, x]", r"\[1, 'x'\] is neither"),
        ("layers_per_stage: true", "True is neither"),
        ("layout: 3", "pipeline.layout=3: it should be a valid string"),
        ("first_stage_layers: -1", "Give 0 or more"),
        ("modules_per_stage: [a]", "pipeline.modules_per_stage.0='a'"),
    ],
)
def test_keys_that_are_refused(tmp_path: Path, keys: str, message: str) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG.replace("PIPELINE", keys))
    with pytest.raises(ConfigError, match=message):
        load_config(tmp_path / "config.yaml")
