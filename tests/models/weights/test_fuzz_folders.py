"""Damaged and edited folders: each is read as transformers or PEFT reads it in one process, or refused.

A case edits one file of a small llama's folder, or of its adapter's. What penstock loads has the config that
`from_pretrained` reads and, bit for bit, its weights; where that fails, penstock raises a typed error, too.
"""

from __future__ import annotations

import json
import random
import shutil
import struct
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedModel
from transformers import logging as transformers_logging

from penstock.errors import PenstockError
from penstock.models.adapters import names_in_file
from penstock.models.source import open_source
from penstock.models.weights.files import INDEX, SINGLE, tied_names

# an adapter's config as `penstock merge` reads it, without the whole command
from penstock.models.weights.saved_adapter import adapter_file, check_adapter, config_in, load_adapter
from penstock.train.encoding.tokenizer import byte_level_tokenizer, open_tokenizer
from support.mutations import CASES, mutated_bytes, mutated_json, seeded

CONFIG = LlamaConfig(
    vocab_size=16, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, max_position_embeddings=16, bos_token_id=1, eos_token_id=2,
)  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIG)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, model: Any) -> Path:
    """A folder with shards, an index, and a tokenizer."""
    folder = tmp_path_factory.mktemp("whole")
    model.save_pretrained(folder, max_shard_size="2KB")
    byte_level_tokenizer(chat=True).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def quiet() -> Any:
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    yield
    transformers_logging.set_verbosity(before)


def edited_text(choices: random.Random, file: Path) -> None:
    """Edit a JSON file: mostly its values, sometimes its bytes."""
    if choices.random() < 0.2:
        file.write_bytes(mutated_bytes(choices, file.read_bytes()))
    else:
        value = mutated_json(choices, json.loads(file.read_text()))
        file.write_text(json.dumps(value))


def edited_header(choices: random.Random, file: Path) -> None:
    """Edit a safetensors file: its header's values, its header's length, or its bytes."""
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    match choices.randrange(4):
        case 0:
            file.write_bytes(mutated_bytes(choices, content))
        case 1:
            length += choices.choice((-1, 1, 8, -8, 2**20, 2**40, 2**62))
            file.write_bytes(struct.pack("<Q", max(0, length)) + content[8:])
        case _:
            header = json.dumps(mutated_json(choices, json.loads(content[8 : 8 + length]))).encode()
            file.write_bytes(struct.pack("<Q", len(header)) + header + content[8 + length :])


def copied(whole: Path, target: Path) -> Path:
    shutil.rmtree(target, ignore_errors=True)
    return shutil.copytree(whole, target)


def outcome(read: Callable[[], Any], errors: type[BaseException]) -> Any:
    """What `read` returns, or the error of these types that it raises."""
    try:
        return read()
    except errors as error:
        return error


def theirs(folder: Path) -> tuple[PreTrainedModel, dict[str, Any]]:
    loaded: tuple[PreTrainedModel, dict[str, Any]] = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, local_files_only=True, use_safetensors=True
    )
    return loaded


def ours(folder: Path) -> PreTrainedModel:
    source = open_source(folder, None, None)
    with source.with_room():
        source.fill(source.model, 0)
    return source.model


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name].nan_to_num(), value.nan_to_num()), name


def compare(folder: Path) -> str:
    """Raise AssertionError unless both give the same weights, or penstock refuses. Returns what happened."""
    found = outcome(lambda: ours(folder), PenstockError)
    if isinstance(found, PenstockError):
        assert str(found)
        return "refused"
    expected, report = theirs(folder)
    assert not any(report.values()), report
    assert found.config.to_json_string() == expected.config.to_json_string()
    assert_same(found.state_dict(), expected.state_dict())
    return "equal"


WEIGHTS: dict[str, Callable[[random.Random, Path], None]] = {
    "index": lambda choices, folder: edited_text(choices, folder / INDEX),
    "header": lambda choices, folder: edited_header(
        choices, choices.choice(sorted(folder.glob("*.safetensors")))
    ),
    "stray": lambda choices, folder: stray(choices, folder),
    "config": lambda choices, folder: edited_text(choices, folder / "config.json"),
}


def stray(choices: random.Random, folder: Path) -> None:
    """Files that were left behind, went astray, or changed places."""
    files = sorted(folder.glob("model*"))
    one, other = choices.choice(files), choices.choice(files)
    match choices.randrange(4):
        case 0:
            one.unlink()
        case 1:
            name = choices.choice((SINGLE, INDEX, "model-00009.safetensors", "model.bin"))
            (folder / name).write_bytes(one.read_bytes())
        case 2:
            content = one.read_bytes()
            one.write_bytes(other.read_bytes())
            other.write_bytes(content)
        case _:
            one.rename(folder / f"{one.name}.old")


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("cases", CASES)
def test_weights_are_transformers_or_refused(tmp_path: Path, whole: Path, kind: str, cases: range) -> None:
    seen = set()
    for number in cases[:: 3 if cases.start == 0 else 1]:
        with seeded(number) as choices:
            folder = copied(whole, tmp_path / "model")
            WEIGHTS[kind](choices, folder)
            seen.add(compare(folder))
    assert seen == {"equal", "refused"}


def encoded(folder: Path, text: str) -> list[int]:
    return open_tokenizer(str(folder), chat=True).prompt(text)


@pytest.mark.parametrize("cases", CASES)
def test_tokenizers_are_transformers_or_refused(tmp_path: Path, whole: Path, cases: range) -> None:
    text, seen = "Keep the pipe full, 100 % \u00e4", set()
    for number in cases:
        with seeded(number) as choices:
            folder = copied(whole, tmp_path / "model")
            edited_text(
                choices, choices.choice([folder / "tokenizer.json", folder / "tokenizer_config.json"])
            )
            found = outcome(partial(encoded, folder, text), PenstockError)
            seen.add(isinstance(found, PenstockError))
            if not isinstance(found, PenstockError):
                assert found == AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    assert seen == {True, False}


# ---- Adapters


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory, model: Any) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    config = LoraConfig(
        r=2, target_modules=["q_proj", "up_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM"
    )
    made = get_peft_model(AutoModelForCausalLM.from_config(CONFIG), config)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(1))
    made.save_pretrained(folder)
    return folder


def adapted(base: Path, folder: Path) -> dict[str, Tensor]:
    """The state of the base model with the adapter of a folder, read as `penstock merge` reads it."""
    config = config_in(folder)
    config.init_lora_weights = True
    source = open_source(base, None, None, config)
    assert source.adapter is not None
    names, ties = names_in_file(source.model, source.adapter), tied_names(source.model)
    with adapter_file(folder) as file:
        check_adapter(file, source.model, names, ties)
    source.fill(source.model, 0)
    load_adapter(source.model, folder, names, ties)
    state: dict[str, Tensor] = source.model.state_dict()
    return state


@pytest.mark.filterwarnings("ignore:Unexpected keyword arguments")  # PEFT's, of keys that it does not know
@pytest.mark.parametrize("cases", CASES)
def test_adapters_are_pefts_or_refused(tmp_path: Path, whole: Path, adapter: Path, cases: range) -> None:
    seen = set()
    for number in cases[:: 3 if cases.start == 0 else 1]:
        with seeded(number) as choices:
            folder = copied(adapter, tmp_path / "adapter")
            if choices.random() < 0.5:
                edited_text(choices, folder / "adapter_config.json")
            else:
                edited_header(choices, folder / "adapter_model.safetensors")
            found = outcome(partial(adapted, whole, folder), PenstockError)
            seen.add(isinstance(found, PenstockError))
            if isinstance(found, PenstockError):
                continue
            base = AutoModelForCausalLM.from_pretrained(whole)
            config = PeftConfig.from_pretrained(str(folder))
            config.init_lora_weights = True  # the values come from the file
            peft = PeftModel.from_pretrained(base, str(folder), config=config)
            expected = peft.base_model.model.state_dict()
            assert_same(found, expected)
    assert seen == {True, False}
