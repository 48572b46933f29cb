"""Streams: every record once an epoch, mixed by the buffer, and gone on with exactly from a checkpoint."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from penstock.errors import CheckpointError, ConfigError, DataError
from penstock.train.config.load import load_config
from penstock.train.config.sections import TrainConfig
from penstock.train.data.batches import Data, LoadedBatch
from penstock.train.data.loading import load_data, tokenizer_of
from support.refusals import refuses

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def write(path: Path, count: int, longest: int = 11, letters: str = LETTERS) -> str:
    """Documents of one letter each, which shows where its tokens went."""
    texts = (letters[number % len(letters)] * (2 + number % longest) for number in range(count))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def config(folder: Path, ramp: Sequence[dict[str, int]] = (), **data: Any) -> TrainConfig:
    validation = {"path": write(folder / "held.jsonl", 20, letters="ab"), "kind": "jsonl"}
    section = {
        "path": write(folder / "a.jsonl", 40), "tokenizer": "bytes", "sequence_length": 8,
        "streaming": {"buffer": 7}, "validation": validation, **data,
    }  # fmt: skip
    given = {key: value for key, value in section.items() if value is not None}
    return TrainConfig.model_validate({
        "model": {"config": {"model_type": "qwen3"}}, "data": given,
        "train": {"batch_size": 3, "seed": 3, "ramp": ramp}, "pipeline": {"microbatches": 2},
    })  # fmt: skip


def load(made: TrainConfig, vocabulary: int = 300) -> Data:
    return load_data(made, tokenizer_of(made), vocabulary)


def tensors(batch: LoadedBatch) -> list[torch.Tensor]:
    parts = [batch.content] if isinstance(batch.content, dict) else batch.content
    return [part[name] for part in parts for name in sorted(part)]


def same(one: LoadedBatch, other: LoadedBatch) -> bool:
    first, second = tensors(one), tensors(other)
    return len(first) == len(second) and all(map(torch.equal, first, second)) and one.fill == other.fill


def letters(batches: list[LoadedBatch]) -> Counter[str]:
    ids = torch.cat([
        part["input_ids"].flatten() for batch in batches
        for part in ([batch.content] if isinstance(batch.content, dict) else batch.content)
    ])  # fmt: skip
    return Counter(chr(token) for token in ids.tolist() if token)


MIXTURE: list[dict[str, Any]] = [{"path": "a.jsonl", "weight": 2}, {"path": "b.jsonl", "weight": 1}]


@pytest.mark.parametrize("packing", ["stream", "none", "sequential"])
@pytest.mark.parametrize("mixed", [False, True])
def test_a_resumed_stream_has_the_rows_of_one_that_went_on(tmp_path: Path, packing: str, mixed: bool) -> None:
    more: dict[str, Any] = {}
    if mixed:
        write(tmp_path / "b.jsonl", 9, longest=30)
        more = {"path": None, "mixture": [each | {"path": str(tmp_path / each["path"])} for each in MIXTURE]}
    made = config(tmp_path, packing=packing, **more)
    undisturbed = load(made)
    batches = list(undisturbed.batches(range(1, 31), torch.device("cpu")))  # several epochs
    for done in (1, 13, 29):
        state = json.loads(json.dumps(undisturbed.state(done, batches[done - 1].position)))
        resumed = load(made).at(done, state, 30)
        rest = list(resumed.batches(range(done + 1, 31), torch.device("cpu")))
        assert all(map(same, rest, batches[done:]))
    assert same(load(made).batch(9), batches[8])
    assert not same(batches[0], batches[1])


RAMP = [{"until": 4, "batch_size": 1, "sequence_length": 5}, {"until": 7, "batch_size": 2}]


@pytest.mark.parametrize("packing", ["stream", "sequential"])
def test_a_ramp_takes_the_rows_of_the_stream_in_turn_and_goes_on_exactly(
    tmp_path: Path, packing: str
) -> None:
    """The rows of the full size, cut where a phase has shorter ones."""
    made = config(tmp_path, RAMP, packing=packing)
    data, plain = load(made), load(config(tmp_path, packing=packing))
    batches = list(data.batches(range(1, 13), torch.device("cpu")))
    taken = [row for batch in batches for row in rows_in(batch)]
    expected = [row for step in range(1, 10) for row in rows_in(plain.batch(step))][: len(taken)]
    assert len(taken) == 4 * 1 + 3 * 2 + 5 * 3
    if packing == "stream":
        assert taken == [row[:5] for row in expected[:4]] + expected[4:]
    else:  # the longest of a batch comes first
        assert Counter(token for row in taken[10:] for token in row) == Counter(
            token for rows in held_rows(plain, 10, 15) for token in rows
        )
        assert [len(row) for row in taken[:4]] == [min(len(row), 5) for row in held_rows(plain, 0, 4)]
    for done in (2, 4, 6, 9):
        state = json.loads(json.dumps(data.state(done, batches[done - 1].position)))
        rest = list(load(made).at(done, state, 30).batches(range(done + 1, 13), torch.device("cpu")))
        assert all(map(same, rest, batches[done:]))


def rows_in(batch: LoadedBatch) -> list[list[int]]:
    if isinstance(batch.content, dict):
        found: list[list[int]] = batch.content["input_ids"].tolist()
        return found
    return [[t for t in row if t] for part in batch.content for row in part["input_ids"].tolist()]


def held_rows(data: Data, first: int, count: int) -> list[list[int]]:
    """The tokens of rows of a stream, in their order."""
    assert data.stream is not None
    taken, _ = data.stream.take(first, count)
    return [[token for piece in taken.read(row) for token in piece.ids.tolist()] for row in range(count)]


@pytest.mark.parametrize("buffer", [1, 7, 100])
def test_each_epoch_has_each_record_once_in_an_order_that_the_buffer_mixes(
    tmp_path: Path, buffer: int
) -> None:
    made = config(tmp_path, streaming={"buffer": buffer}, packing="none", sequence_length=16)
    data = load(made)
    batches = [data.batch(step) for step in range(1, 1 + 4 * 40)]  # 12 epochs
    counts = letters(batches)
    expected = Counter({LETTERS[number]: 12 * (2 + number % 11) for number in range(40)})
    total = sum(expected.values())
    assert abs(sum(counts.values()) - total) <= 30 + 13 * buffer
    if buffer == 1:
        assert counts == expected
        assert set(letters(batches[:3])) == {*"abcdefghi"}
    else:
        assert set(letters(batches[:3])) != {*"abcdefghi"}
        assert counts.keys() == expected.keys()


def test_parts_of_a_mesh_have_the_batch_of_one_process(tmp_path: Path) -> None:
    made = config(tmp_path, packing="none")
    whole = letters([load(made).batch(4)])
    parts = [replace(load(made), parts=3).of(part).batch(4) for part in range(3)]
    assert sum((letters([part]) for part in parts), Counter()) == whole


def test_a_place_of_another_stream_is_refused(tmp_path: Path) -> None:
    made = config(tmp_path)
    data = load(made)
    state = data.state(1, data.batch(1).position)
    with refuses(CheckpointError, "the checkpoint's position in the data", "written without"):
        data.at(1, None, 9)
    with refuses(CheckpointError, "the checkpoint's position in the data", "written without"):
        data.at(1, {"digest": data.digest, "position": None}, 9)
    write(tmp_path / "a.jsonl", 41)
    other = load(TrainConfig.model_validate(made.model_dump(mode="json")))
    for accept in (False, True):  # a stream's place means nothing in other files
        with refuses(CheckpointError, "the checkpoint's position", "a.jsonl has", "Give the data"):
            other.at(1, state, 9, accept=accept)
    options = made.model_copy(update={"train": made.train.model_copy(update={"seed": 8})})
    write(tmp_path / "a.jsonl", 40)
    with refuses(CheckpointError, "the checkpoint's position in the data", "options changed"):
        load(options).at(1, state, 9)


def test_megatrons_files_have_no_records(tmp_path: Path) -> None:
    """They were handed to datasets, which could not load them."""
    with refuses(DataError, "a.bin", "Megatron's files are", "Leave data.streaming out"):
        load(config(tmp_path, path=str(tmp_path / "a.bin")))


def test_wrong_records_are_refused_when_the_run_starts(tmp_path: Path) -> None:
    made = config(tmp_path)
    with refuses(DataError, "line ", "ids 0 to 98"):
        load(made, vocabulary=99)
    (tmp_path / "a.jsonl").write_text("")
    with refuses(DataError, rule="it holds no text"):
        load(made)
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n')
    with refuses(DataError, rule="token that counts"):
        load(made)


@pytest.mark.parametrize(
    ("keys", "rule"),
    [
        ("{streaming: {}}", "data.streaming has no end to hold out"),
        ("{streaming: {}, validation: {path: b}, packing: best_fit}", "sorts all documents"),
        (
            "{path: null, mixture: [{path: a, epochs: 2}], streaming: {}, validation: {path: b}}",
            "Leave epochs out",
        ),
        ("{kind: megatron, streaming: {}, validation: {path: b}}", "Megatron"),
        ("{path: null, mixture: []}", "one of data.path and data.mixture is needed, and here neither is"),
        ("{mixture: [{path: b}]}", "one of data.path and data.mixture is needed, and here both are"),
        ("{path: null, mixture: [{path: b, weight: 0}]}", "the weights of data.mixture sum to 0"),
    ],
)
def test_keys_that_do_not_fit_are_refused(tmp_path: Path, keys: str, rule: str) -> None:
    file = tmp_path / "config.yaml"
    base = "{path: a, tokenizer: bytes}"
    file.write_text(f"model: {{config: {{model_type: qwen3}}}}\ndata: {base}\n")
    overrides = [f"data.{key}" for key in _flat(keys)]
    with pytest.raises(ConfigError, match=rule):
        load_config(file, overrides)


def _flat(keys: str) -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in yaml.safe_load(keys).items()]
