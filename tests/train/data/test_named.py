"""Data sets by name, loaded by the package datasets: from folders here, as the tests have no network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from huggingface_hub import constants

from penstock.errors import ConfigError, DataError
from penstock.train.config.load import load_config
from penstock.train.config.sections import TrainConfig
from penstock.train.data.batches import Data
from penstock.train.data.loading import load_data, tokenizer_of
from penstock.train.preflight import preflight
from penstock.train.run import run
from support.refusals import refuses
from support.tiny import QWEN3, config_file, held_out_losses, tree


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of datasets, in the test's folder."""
    folder = tmp_path / "cache of datasets"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
    return folder


def offline(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(constants, "HF_HUB_OFFLINE", True)
    patch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def texts(letter: str, count: int) -> list[dict[str, str]]:
    return [{"text": letter * (2 + number)} for number in range(count)]


def write(folder: Path, form: str) -> str:
    """Two splits, of 12 and 5 texts."""
    folder.mkdir()
    for split, rows in {"train": texts("a", 12), "test": texts("v", 5)}.items():
        if form == "parquet":
            datasets.Dataset.from_list(rows).to_parquet(folder / f"{split}.parquet")
        else:
            (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(folder)


def config(**data: Any) -> TrainConfig:
    section = {"tokenizer": "bytes", "sequence_length": 40, "packing": "none", **data}
    train = {"batch_size": 4, "steps": 5}
    return TrainConfig.model_validate({"model": {"config": QWEN3}, "data": section, "train": train})


def load(**data: Any) -> Data:
    made = config(**data)
    return load_data(made, tokenizer_of(made), 300)


def read(rows: Any) -> list[bytes]:
    """The texts, sorted."""
    pieces = (piece for row in range(len(rows)) for piece in rows.read(row))
    return sorted(bytes(piece.ids.tolist()).strip(b"\0") for piece in pieces)


@pytest.mark.parametrize("form", ["parquet", "json"])
def test_a_split_has_the_rows_that_datasets_finds(tmp_path: Path, form: str) -> None:
    path = write(tmp_path / "set", form)
    data = load(path=path, split="train", validation={"path": path, "split": "test"})
    assert read(data.rows) == [row["text"].encode() for row in texts("a", 12)]
    assert read(data.held_out) == [row["text"].encode() for row in texts("v", 5)]


def test_a_mixture_names_a_split_of_each_and_a_run_trains_on_it(tmp_path: Path) -> None:
    path = write(tmp_path / "set", "json")
    made = tree(tmp_path)
    made["data"] = {
        "tokenizer": "bytes", "sequence_length": 40, "packing": "none", "held_out": 0.2,
        "mixture": [{"path": path, "split": "train", "weight": 2}, {"path": path, "split": "test"}],
    }  # fmt: skip
    run(preflight(TrainConfig.model_validate(made)))
    losses = held_out_losses(tmp_path)
    assert losses[-1] < losses[0]


def test_what_the_cache_holds_is_read_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "set", "json")
    first = load(path=path, split="train")
    offline(monkeypatch)
    assert load(path=path, split="train").digest == first.digest


def test_a_name_without_network_and_cache_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    offline(monkeypatch)
    with refuses(
        DataError,
        "data.path=nobody/nothing with split=train, config=en",
        "datasets cannot load it (",
        "it must be in the cache of datasets: load it once with a network, or give a local path",
    ):
        load(path="nobody/nothing", split="train", config="en")
    with refuses(DataError, "data.path=nobody/nothing", "there is no such file", "give its split too"):
        load(path="nobody/nothing")


def test_a_split_or_config_that_is_not_there_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "set", "json")
    with refuses(DataError, "with split=dev", "['train', 'test']", "Name a split of this folder"):
        load(path=path, split="dev")
    with refuses(DataError, "with split=train, config=fr", "BuilderConfig 'fr' not found"):
        load(path=path, split="train", config="fr")
    with refuses(DataError, "with split=train", "data.kind=text reads files", "Take one of auto, chat"):
        load(path=path, split="train", kind="text")


@pytest.mark.parametrize(
    ("keys", "rule", "remedy"),
    [
        ({"split": "train[:10%]"}, "no split's name", "data.held_out"),
        ({"config": "en"}, "config=en", "split"),
        ({"revision": "main"}, "revision=main", "split"),
    ],
)
def test_wrong_keys_are_refused(tmp_path: Path, keys: dict[str, str], rule: str, remedy: str) -> None:
    with refuses(ConfigError, "data", rule, remedy):
        load_config(config_file(tmp_path, data=keys))
