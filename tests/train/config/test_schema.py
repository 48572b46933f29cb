"""The schema takes what the trainer takes, and says what each key means."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from penstock.train.config.schema import json_schema
from penstock.yaml_reader import parse_yaml

CONFIGS = sorted((Path(__file__).parents[3] / "configs").rglob("*.yaml"))
LEAST: dict[str, Any] = {"model": {"path": "models/mine"}, "data": {"path": "book.txt"}}


@pytest.fixture(scope="module")
def validator() -> Any:
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_each_config_of_the_project_is_valid(path: Path, validator: Any) -> None:
    assert [error.message for error in validator.iter_errors(parse_yaml(path.read_text()))] == []


@pytest.mark.parametrize(
    ("section", "keys"),
    [
        ("train", {"stepz": 3}),
        ("train", {"steps": 0}),
        ("train", {"precision": "half"}),
        ("pipeline", {"schedule": 3}),
        ("optimizer", {"name": "sgd"}),
        ("trainer", {}),
    ],
)
def test_a_mistake_is_found(section: str, keys: dict[str, Any], validator: Any) -> None:
    assert validator.is_valid(LEAST)
    assert not validator.is_valid({**LEAST, section: keys})


@pytest.mark.parametrize(
    "text",
    [
        "train: {activation_checkpointing: true}",
        "train: {activation_checkpointing: {every: 2, save: [attention]}}",
        "pipeline: {schedule: {schedule: 1f1b, stages_per_rank: 2}, layers_per_stage: [4, 4]}",
        "optimizer: {name: muon, adamw: {learning_rate: 0.001}}",
        "output: {trackers: [{name: wandb, project: mine, mode: offline}, mlflow]}",
        "adapter: null",
    ],
)
def test_each_form_of_a_key_is_valid(text: str, validator: Any) -> None:
    assert [error.message for error in validator.iter_errors({**LEAST, **yaml.safe_load(text)})] == []


def test_every_key_says_what_it_means() -> None:
    schema = json_schema()
    silent = [
        f"{section['title']}.{key}"
        for section in (schema, *schema["$defs"].values())
        for key, value in section.get("properties", {}).items()
        if "description" not in value and not {"$ref", "const"} & value.keys()
    ]
    assert silent == []
