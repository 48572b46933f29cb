"""A model's folder that nobody has vouched for: read within limits, and no code of it runs unasked."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import PretrainedConfig

from penstock import AutoPipeline
from penstock.errors import CheckpointError, DataError, ModelError
from penstock.models.model_folder import check_folder, config_from, config_of, other_files
from penstock.models.source import open_source
from penstock.train.encoding.tokenizer import byte_level_tokenizer, open_tokenizer
from support.refusals import refuses
from support.tiny import QWEN3
from support.zoo import tiny_config

CODE = """
from pathlib import Path
from transformers import PretrainedConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

Path(__file__).with_name("ran").touch()
Path({ran!r}).touch()

class Config(Qwen3Config):
    model_type = "{name}"

class Model(Qwen3ForCausalLM):
    config_class = Config

class Tokens(PreTrainedTokenizerFast):
    pass
"""


def with_code(folder: Path, name: str, **keys: Any) -> Path:
    """A folder whose code tells by the file `ran` next to it that it was run."""
    folder.mkdir()
    (folder / "own.py").write_text(CODE.format(name=name, ran=str(folder.with_name("ran"))))
    classes = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    config = {**QWEN3, "model_type": name, "auto_map": classes, **keys}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(autouse=True)
def somebody_who_says_yes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 10))


def test_code_of_a_model_runs_only_where_it_is_trusted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.5.0: transformers asked on stdin, and ran it where a pipe said y: penstock left the choice to it."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = with_code(tmp_path / "model", "own_model")
    for refused in (lambda: config_of(folder), lambda: open_source(folder, None, None)):
        with refuses(ModelError, rule="auto_map", remedy="model.trust_remote_code=true"):
            refused()
    assert not (tmp_path / "ran").exists()
    assert "[y/N]" not in capsys.readouterr().out
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    plan = AutoPipeline(ranks=2, microbatches=2, trust_remote_code=True).build_plan(folder)
    assert (tmp_path / "ran").exists()
    assert plan.source.other_files.keys() == {"own.py"}  # a checkpoint takes the code along


def test_a_model_that_transformers_knows_needs_no_code_of_its_folder(tmp_path: Path) -> None:
    config = config_of(with_code(tmp_path / "model", "own_model", model_type="qwen3"))
    assert type(config).__name__ == "Qwen3Config"
    assert not (tmp_path / "ran").exists()


def test_code_of_a_model_class_is_refused_where_the_config_needs_none(tmp_path: Path) -> None:
    """0.5.0: it ran, as its folder's config is one that transformers knows, and the model is not."""
    folder = with_code(tmp_path / "model", "own_model", model_type="clip")
    with refuses(ModelError, "'clip'", remedy="model.trust_remote_code=true"):
        open_source(folder, None, None)
    assert not (tmp_path / "ran").exists()


def test_code_of_a_tokenizer_runs_only_where_it_is_trusted(tmp_path: Path) -> None:
    """0.5.0: transformers asked on stdin here, too; and the error named no key."""
    folder = with_code(tmp_path / "model", "own_model", model_type="qwen3")
    keys = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Tokens"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(keys))
    with refuses(DataError, "data.tokenizer=", remedy="model.trust_remote_code=true"):
        open_tokenizer(str(folder))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("keys", "value", "rule"),
    [
        ({"num_hidden_layers": 1_000_000}, "num_hidden_layers=1000000", "at most 10,000 layers"),
        (
            {"num_hidden_layers": 10**30},
            "num_hidden_layers=1000000000000000000000000000000",
            "at most 10,000 layers",
        ),
        (
            {"text_config": {"num_hidden_layers": 10**9}},
            "text_config.num_hidden_layers=1000000000",
            "at most 10,000 layers",
        ),
        ({"vision_config": {"depth": 10**9}}, "vision_config.depth=1000000000", "at most 10,000 layers"),
        ({"num_hidden_layers": -1}, "num_hidden_layers=-1", "one layer or more"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0", "one layer or more"),
    ],
)
def test_numbers_of_layers_that_no_model_has_are_refused(
    tmp_path: Path, keys: dict[str, Any], value: str, rule: str
) -> None:
    """0.5.0: a million layers were built one by one, and -1 was "no list of layers": none was looked at."""
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3, **keys}))
    with refuses(ModelError, value, rule):
        config_of(tmp_path)


@pytest.mark.parametrize(
    ("keys", "value", "rule"),
    [
        ({"attention_dropout": 2.0}, "config.json: attention_dropout=2.0", "a share, from 0 to 1"),
        ({"hidden_dropout_prob": float("nan")}, "hidden_dropout_prob=nan", "a share, from 0 to 1"),
        ({"text_config": {"attn_pdrop": -1}}, "text_config.attn_pdrop=-1", "a share, from 0 to 1"),
        ({"max_position_embeddings": 0}, "max_position_embeddings=0", "one token or more"),
    ],
)
def test_numbers_that_only_a_step_would_have_stumbled_over_are_refused(
    tmp_path: Path, keys: dict[str, Any], value: str, rule: str
) -> None:
    """0.5.0: a traceback of torch's dropout, and "Give 0 or less" for a row: nobody looked at the numbers."""
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3, **keys}))
    with refuses(ModelError, value, rule):
        config_of(tmp_path)


def test_infinity_is_read_as_transformers_writes_it() -> None:
    """0.5.0: a config of Mamba-2 was not read back: transformers writes its infinity in a way of its own."""
    config = tiny_config("mamba2")
    assert config.time_step_limit[1] == float("inf")
    again = config_from(type(config), config.to_json_string())
    assert again.to_dict() == config_from(type(config), again.to_json_string(use_diff=False)).to_dict()
    assert list(again.time_step_limit) == list(config.time_step_limit)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "generation_config.json"])
def test_json_without_keys_is_refused(tmp_path: Path, name: str) -> None:
    """0.5.0: a traceback for `[]`: its keys were asked for at once."""
    byte_level_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    (tmp_path / name).write_text("[]")
    with refuses(ModelError, name, "no keys"):
        open_source(tmp_path, None, None)
    with refuses(DataError, name, "no keys"):
        open_tokenizer(str(tmp_path))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "vocab.txt"])
def test_what_is_no_file_is_refused_before_transformers_opens_it(tmp_path: Path, name: str) -> None:
    """0.5.0: a pipe was passed over, or waited for."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with refuses(ModelError, name, "a pipe"):
        config_of(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", ["[" * 100_000, "{"], ids=["deep", "cut short"])
def test_json_that_cannot_be_read_is_refused_by_the_name_of_its_file(
    tmp_path: Path, name: str, text: str
) -> None:
    """0.5.0: deep JSON of a tokenizer was "no tokenizer there (RecursionError)"."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    (tmp_path / name).write_text(text)
    for kind in (ModelError, DataError):
        with refuses(kind, name, "not JSON"):
            check_folder(tmp_path, kind)


def test_a_file_of_a_tokenizer_that_is_too_large_is_refused_unread(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(1 << 40)
    with refuses(DataError, rule="1,099,511,627,776 bytes, and 64 MiB are read at most"):
        open_tokenizer(str(tmp_path))


def test_other_files_may_be_what_they_like(tmp_path: Path) -> None:
    """Nobody reads them; and the links of a half-emptied cache lead nowhere."""
    byte_level_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    os.mkfifo(tmp_path / "notes")
    (tmp_path / "vocab.json").symlink_to(tmp_path / "nowhere")
    assert isinstance(config_of(tmp_path), PretrainedConfig)
    assert {"tokenizer.json", "tokenizer_config.json"} <= other_files(tmp_path).keys()


@pytest.mark.parametrize(
    ("name", "content", "rule"),
    [
        ("model.safetensors.index.json", "[" * 100_000, "nest deeper"),
        ("model.safetensors", 1 << 26, "header has 67,108,864 bytes"),
        ("model.safetensors", 10**15, "no complete safetensors file"),
    ],
    ids=["a deep index", "a large header", "a header beyond the file"],
)
def test_headers_and_indices_of_weights_are_read_within_limits(
    tmp_path: Path, name: str, content: str | int, rule: str
) -> None:
    """0.5.0: a deep index was a RecursionError, and a header of 90 MB took 1.7 GB: both were parsed unseen.

    content: a text, or the length that a header claims
    """
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    if isinstance(content, str):
        (tmp_path / name).write_text(content)
    else:
        (tmp_path / name).write_bytes(content.to_bytes(8, "little"))
        os.truncate(tmp_path / name, 1 << 27)
    with refuses(CheckpointError, name, rule):
        AutoPipeline(ranks=2, microbatches=2).build_plan(tmp_path)


def test_an_adapter_beside_a_model_is_refused(tmp_path: Path) -> None:
    """Unreleased: the folder's own weights were trained; transformers reads those of the base model that the
    adapter names, and the adapter. Only config.json was looked for.
    """
    tiny_config("qwen3").save_pretrained(tmp_path)
    assert open_source(tmp_path, None, None).model.config.model_type == "qwen3"
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "other"}')
    with refuses(ModelError, rule="it also has an adapter"):
        open_source(tmp_path, None, None)
