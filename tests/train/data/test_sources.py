"""Data from every kind of file, several at once, with a validation set; and what of them is refused."""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch

from penstock.errors import ConfigError, DataError
from penstock.train.config.sections import TrainConfig
from penstock.train.data.batches import Data, LoadedBatch
from penstock.train.data.loading import load_data, tokenizer_of
from penstock.train.data.sources import open_source
from penstock.train.encoding.encode import encoded, make_encoder
from penstock.train.sizes import Size, StepSizes
from support.refusals import refuses
from support.tiny import QWEN3

ROWS = [{"input_ids": [1, 2, 3 + number], "labels": [-100, 2, 3 + number]} for number in range(12)]


def jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def texts(path: Path, letter: str, count: int) -> str:
    return jsonl(path, [{"text": letter * (2 + number)} for number in range(count)])


def chats(path: Path, count: int) -> str:
    said = [("user", "ask"), ("assistant", "say")]
    row = {"messages": [{"role": role, "content": content} for role, content in said]}
    return jsonl(path, [row] * count)


def config(train: dict[str, Any] | None = None, **data: Any) -> TrainConfig:
    section = {"tokenizer": "bytes", "sequence_length": 40, "packing": "none", **data}
    return TrainConfig.model_validate({
        "model": {"config": QWEN3}, "data": section, "train": {"batch_size": 4, "steps": 5, **(train or {})},
    })  # fmt: skip


def load(made: TrainConfig, vocabulary: int = 300) -> Data:
    return load_data(made, tokenizer_of(made), vocabulary)


def refused(made: TrainConfig, vocabulary: int = 300) -> str:
    with pytest.raises((DataError, ConfigError)) as caught:
        load(made, vocabulary)
    assert caught.value.exit_code == 2
    assert caught.value.remedy
    return str(caught.value)


def rows(batch: LoadedBatch) -> list[list[int]]:
    """The tokens of each row, without padding."""
    assert isinstance(batch.content, list)
    return [[token for token in row if token] for part in batch.content for row in part["input_ids"].tolist()]


def everything(data: Data) -> list[list[tuple[int, int]]]:
    """Ids and labels of each row that is trained on or held out, sorted."""
    return sorted(
        list(zip(piece.ids.tolist(), piece.labels.tolist(), strict=True))
        for of in (data.rows, data.held_out) for number in range(len(of)) for piece in of.read(number)
    )  # fmt: skip


def write_tokens(folder: Path) -> list[Path]:
    """The same tokens and labels in every format."""
    made = datasets.Dataset.from_list(ROWS)
    made.save_to_disk(folder / "set")
    table = pyarrow.Table.from_pylist(ROWS)
    (folder / "shards").mkdir()
    for number, part in enumerate((table.slice(0, 5), table.slice(5))):
        pyarrow.parquet.write_table(part, folder / "shards" / f"train-{number}.parquet")
    pyarrow.parquet.write_table(table, folder / "one.parquet")
    jsonl(folder / "lines.jsonl", ROWS)
    (folder / "list.json").write_text(json.dumps(ROWS))
    arrow = next((folder / "set").glob("*.arrow"))
    return [folder / name for name in ("set", "shards", "one.parquet", "lines.jsonl", "list.json")] + [arrow]


def test_tokens_are_the_same_from_every_format(tmp_path: Path) -> None:
    found = [load(config(path=str(path), kind="tokens")) for path in write_tokens(tmp_path)]
    expected = sorted(list(zip(row["input_ids"], row["labels"], strict=True)) for row in ROWS)
    assert [everything(data) for data in found] == [expected] * len(found)
    assert len({data.digest for data in found}) == 1
    by_itself = load(config(path=str(tmp_path / "lines.jsonl"), kind="auto"))
    assert everything(by_itself) == expected
    alone = load(config(path=jsonl(tmp_path / "alone.jsonl", [{"input_ids": [5, 6, 7]}] * 12)))
    assert everything(alone) == [[(5, 5), (6, 6), (7, 7)]] * 12


def test_parquet_holds_text_and_chats_too(tmp_path: Path) -> None:
    table = pyarrow.Table.from_pylist([{"text": "abc", "other": 1}] * 12)
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    abc = [(97, 97), (98, 98), (99, 99)]
    found = everything(load(config(path=str(tmp_path / "a.parquet"))))
    assert found == [abc, *[[*abc, (0, 0)]] * 11]  # a separator between documents
    lines = json.loads(Path(chats(tmp_path / "c.jsonl", 12)).read_text().splitlines()[0])
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([lines] * 12), tmp_path / "c.parquet")
    one, other = (load(config(path=str(tmp_path / f"c.{end}"), kind="chat")) for end in ("jsonl", "parquet"))
    assert everything(one) == everything(other)
    assert one.digest == other.digest


def test_a_mixture_has_its_shares_and_epochs(tmp_path: Path) -> None:
    sources = [
        {"path": texts(tmp_path / "a.jsonl", "a", 20), "kind": "jsonl", "weight": 3},
        {"path": texts(tmp_path / "b.jsonl", "b", 20), "kind": "jsonl", "weight": 1, "epochs": 1},
    ]
    data = load(config({"steps": 8}, mixture=sources, held_out=0.2))
    found = [row for step in range(1, 33) for row in rows(data.batch(step))]
    first = Counter(chr(row[0]) for row in found[:40])
    assert first == {"a": 30, "b": 10}
    lengths = Counter(len(row) for row in found if row[0] == ord("b"))
    assert set(lengths.values()) == {1}  # one epoch, and then no more of it
    held = [row for batch in data.held_out_batches(9) for row in rows(batch)]
    assert {chr(row[0]) for row in held} == {"a", "b"}
    assert all(row not in held for row in found)


@pytest.mark.parametrize("packing", ["stream", "none", "best_fit"])
def test_a_mixture_goes_on_at_any_step(tmp_path: Path, packing: str) -> None:
    sources = [
        {"path": texts(tmp_path / "a.jsonl", "a", 30), "weight": 0.7},
        {"path": chats(tmp_path / "c.jsonl", 30), "weight": 0.3, "epochs": 3, "kind": "chat"},
    ]
    made = config(mixture=sources, packing=packing, sequence_length=32)
    whole = list(load(made).batches(range(1, 25), torch.device("cpu")))
    resumed = load(made).at(17, json.loads(json.dumps(load(made).state(17, None))), 24)
    rest = list(resumed.batches(range(18, 25), torch.device("cpu")))
    for one, other in zip(rest, whole[17:], strict=True):
        parts = [[each.content] if isinstance(each.content, dict) else each.content for each in (one, other)]
        assert all(torch.equal(a[name], b[name]) for a, b in zip(*parts, strict=True) for name in a)


@pytest.mark.parametrize("streaming", [False, True])
def test_steps_of_another_size_go_on_with_the_next_row(tmp_path: Path, streaming: bool) -> None:
    """After 5 steps of 8 rows, steps of 4 rows took rows of the steps before again."""
    held = texts(tmp_path / "v.jsonl", "v", 8)
    sources = [
        {"path": texts(tmp_path / "a.jsonl", "a", 25), "weight": 0.7},
        {"path": texts(tmp_path / "b.jsonl", "b", 25), "weight": 0.3} | ({} if streaming else {"epochs": 1}),
    ]
    more: dict[str, Any] = {"streaming": {"buffer": 5}} if streaming else {}
    keys = {"mixture": sources, "validation": {"path": held}, "kind": "jsonl", **more}
    eight, four = (load(config({"batch_size": size}, **keys)) for size in (8, 4))
    whole = [eight.batch(step) for step in range(1, 9)]
    state = json.loads(json.dumps(eight.state(5, whole[4].position)))
    resumed = four.at(5, state, 11)
    found = [resumed.batch(step) for step in range(6, 12)]
    assert rows_of(*found) == rows_of(*whole[5:])
    state = json.loads(json.dumps(resumed.state(8, found[2].position)))  # in steps of 8 rows again
    assert rows_of(eight.at(8, state, 9).batch(9)) == rows_of(*found[3:5])


def rows_of(*batches: LoadedBatch) -> list[list[int]]:
    return sorted(row for batch in batches for row in rows(batch))


def test_epochs_that_end_before_the_last_step_of_a_resumed_run_are_refused(tmp_path: Path) -> None:
    source = {"path": texts(tmp_path / "a.jsonl", "a", 30), "epochs": 1}
    keys = {"mixture": [source], "validation": {"path": texts(tmp_path / "v.jsonl", "v", 8)}, "kind": "jsonl"}
    before, narrow = (load(config({"batch_size": size, "steps": 3}, **keys)) for size in (8, 5))
    state = before.state(3, None)
    assert rows(narrow.at(3, state, 4).batch(4))
    with refuses(ConfigError, "data.mixture", "24 rows are taken, and train.steps=5", "train.steps to 4"):
        narrow.at(3, state, 5)


def test_a_validation_set_leaves_all_of_the_data_to_train_on(tmp_path: Path) -> None:
    path, other = texts(tmp_path / "a.jsonl", "a", 12), texts(tmp_path / "v.jsonl", "v", 8)
    data = load(config(path=path, kind="jsonl", validation={"path": other}))
    assert len(data.rows) == 12
    assert len(data.held_out) == 8
    assert {chr(row[0]) for batch in data.held_out_batches(2) for row in rows(batch)} == {"v"}
    few = texts(tmp_path / "few.jsonl", "v", 3)
    smaller = load(config(path=path, kind="jsonl", validation={"path": few}))
    (batch,) = smaller.held_out_batches(2)
    assert len(rows(batch)) == 3
    (tmp_path / "short").write_text("v")
    said = refused(
        config(path=path, kind="jsonl", validation={"path": str(tmp_path / "short"), "kind": "text"})
    )
    assert "data.validation.path=" in said
    assert "it gives no row to evaluate on" in said


@pytest.mark.parametrize(("overlong", "longest"), [("truncate", 40), ("drop", 27)])
def test_long_chats_are_truncated_or_dropped(tmp_path: Path, overlong: str, longest: int) -> None:
    chats(tmp_path / "c.jsonl", 12)
    lines = (tmp_path / "c.jsonl").read_text()
    # the first is cut within its answer, the second before it, and no token of that one would count
    for ask, say in (("ask", "x" * 99), ("x" * 99, "say")):
        row = {"messages": [{"role": "user", "content": ask}, {"role": "assistant", "content": say}]}
        lines = json.dumps(row) + "\n" + lines
    (tmp_path / "c.jsonl").write_text(lines)
    data = load(config(path=str(tmp_path / "c.jsonl"), kind="chat", overlong=overlong))
    assert len(everything(data)) == (13 if overlong == "truncate" else 12)
    assert max(map(len, everything(data))) == longest
    assert all(any(label != -100 for _, label in row[1:]) for row in everything(data))


REFUSED = [
    ({"input_ids": [1, -2]}, "token ids are 0 or more, and here is -2"),
    ({"input_ids": [1, 2], "labels": [1, -5]}, "a label is a token id, or -100, and here is -5"),
    ({"input_ids": [1, 2], "labels": [1]}, "it has 1 labels for 2 tokens"),
    ({"input_ids": "no"}, "input_ids is a list of whole numbers, and here is a str"),
    ({"input_ids": [[1], [2]]}, "input_ids is a list of whole numbers"),
    ({"input_ids": None}, "input_ids is a list of whole numbers"),
    ({"tokens": [1]}, "it has no field 'input_ids', only 'tokens'"),
    ({"input_ids": [1, 2], "labels": [1, 300]}, "it gives token id 300 and the model has ids 0 to 299"),
    ({"input_ids": [1, 301]}, "it gives token id 301 and the model has ids 0 to 299"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "rule"), REFUSED)
def test_wrong_tokens_are_refused_with_their_line(tmp_path: Path, row: dict[str, Any], rule: str) -> None:
    path = jsonl(tmp_path / "a.jsonl", [*ROWS, row])
    said = refused(config(path=path, kind="tokens"))
    assert f"data file {path} line 13: {rule}" in said


def test_other_wrong_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = pyarrow.Table.from_pylist([{"body": "abc"}] * 12)
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert "row 0: it has no field 'text', only 'body'" in refused(config(path=str(tmp_path / "a.parquet")))
    (tmp_path / "b.parquet").write_bytes(b"PAR1 no")
    assert "pyarrow cannot read it as Parquet" in refused(config(path=str(tmp_path / "b.parquet")))
    (tmp_path / "c.txt").write_text("text")
    said = refused(config(path=str(tmp_path / "c.txt"), kind="chat"))
    assert "data.kind=chat reads JSON, JSONL, Parquet or a dataset, and here is .txt" in said
    path = chats(tmp_path / "d.jsonl", 12)
    assert "the model has ids 0 to 256 (vocab_size), first in" in refused(config(path=path, kind="chat"), 257)
    (tmp_path / "e.json").write_text("[{}, 3]")
    said = refused(config(path=str(tmp_path / "e.json"), kind="chat"))
    assert "e.json entry 2: each entry of the list is an object" in said
    few = [{"path": texts(tmp_path / "a.jsonl", "a", 12), "epochs": 1, "kind": "jsonl"}]
    assert "rows in all epochs: train.steps=99 batches of 4 take 396" in refused(
        config({"steps": 99}, mixture=few)
    )
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install 'penstock[datasets]'" in refused(config(path=str(tmp_path / "a.parquet")))
    assert len(load(config(path=path, kind="chat")).rows) == 8  # JSONL needs no further package


def test_tokens_are_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = config(path=chats(tmp_path / "a.jsonl", 12), kind="chat", cache=str(tmp_path / "cache"))
    first = load(made)
    from penstock.train.data import loading

    monkeypatch.setattr(loading, "encoded", None)
    assert load(made).digest == first.digest
    other = made.model_copy(update={"data": made.data.model_copy(update={"loss_on": "all"})})
    with pytest.raises(TypeError):
        load(other)
    same_text = config(path=chats(tmp_path / "copy.jsonl", 12), kind="chat", cache=str(tmp_path / "cache"))
    assert load(same_text).digest == first.digest


@pytest.mark.sweep
def test_workers_make_the_same_tokens_in_the_same_order(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"text": f"text {number}"} for number in range(5300)])
    made = config(path=path, kind="jsonl")
    source = open_source(made.data.sources[0])
    encoder = make_encoder(made.data, source, tokenizer_of(made))
    alone, together = (
        [
            (name, found.ids.tolist())
            for _, block in encoded(encoder, source, workers)
            for name, found in block
            if found
        ]
        for workers in (0, 2)
    )
    assert alone == together
    assert len(alone) == 5300
    jsonl(tmp_path / "a.jsonl", [{"text": "x"}] * 2000 + [{"no": "x"}])
    with refuses(DataError, "line 2001"):
        list(encoded(encoder, source, 2))


def test_reading_rows_keeps_no_page_mapped(tmp_path: Path) -> None:
    """What is read of a mapped file counts to a process until it is unmapped."""
    tokens = np.zeros(1 << 24, np.uint8)
    tokens.tofile(tmp_path / "a.bin")
    path = tmp_path / "a.bin"
    data = load(config(path=str(path), kind="text", packing="stream", sequence_length=4096))
    before = mapped_pages()
    for step in range(1, 400):
        replace(data, sizes=StepSizes((), Size(8, 4096, (2,)))).batch(step)
    assert mapped_pages() - before < 4 << 20


def mapped_pages() -> int:
    """Bytes of this process's memory that are pages of files."""
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssFile")
    )
    return int(line.split()[1]) * 1024


def test_a_step_of_cut_rows_in_which_no_token_counts_is_refused_before_the_run(tmp_path: Path) -> None:
    """Other rows may have none as long as their step has one."""
    late = {"input_ids": [1] * 8, "labels": [-100] * 7 + [1]}
    early = {"input_ids": [1] * 8, "labels": [-100, 1] + [-100] * 6}
    path = jsonl(tmp_path / "a.jsonl", [late] * 30)
    ramp = [{"until": 2, "batch_size": 2, "sequence_length": 4}]
    said = refused(config({"ramp": ramp}, path=path, kind="tokens"))
    assert said.startswith("train.ramp with sequence_length=4: the rows of step 1, cut to so many tokens, ")
    load(config({"ramp": [{"until": 2, "batch_size": 2}]}, path=path, kind="tokens"))
    load(config({"ramp": [{"until": 2, "sequence_length": 8}]}, path=path, kind="tokens"))
    path = jsonl(tmp_path / "b.jsonl", [late, early, early] * 10)
    data = load(config({"ramp": [{"until": 9, "sequence_length": 4}]}, path=path, kind="tokens"))
    counted = set()
    for step in range(1, 9):
        content = data.batch(step).content
        assert isinstance(content, list)
        counted |= {count for part in content for count in (part["labels"] == 1).sum(1).tolist()}
    assert counted == {0, 1}
    streamed = {"streaming": {}, "validation": {"path": path, "kind": "tokens"}}
    said = refused(config({"ramp": ramp}, path=path, kind="tokens", **streamed))
    assert said.startswith("train.ramp with sequence_length, and data.streaming: the loss counts some tokens")


# ---- made-up tokens


def dummy(folder: Path, **data: Any) -> Data:
    data = {"kind": "dummy", "packing": "stream", "sequence_length": 16, "cache": str(folder), **data}
    made = TrainConfig.model_validate({
        "model": {"config": QWEN3}, "data": data, "train": {"batch_size": 4, "steps": 5},
    })  # fmt: skip
    assert TrainConfig.model_validate(made.model_dump()) == made
    return load(made, 256)


def test_made_up_tokens_need_neither_files_nor_a_tokenizer(tmp_path: Path) -> None:
    data = dummy(tmp_path)
    assert len(data.rows) + len(data.held_out) == 1000
    batch = data.batch(1)
    assert isinstance(batch.content, dict)
    assert batch.content["input_ids"].shape == (4, 16)
    assert len(set(batch.content["input_ids"].flatten().tolist())) > 16
    assert torch.equal(batch.content["input_ids"], batch.content["labels"])
    again = dummy(tmp_path / "other").batch(1).content
    other = dummy(tmp_path, dummy={"seed": 1}).batch(1).content
    assert isinstance(again, dict)
    assert isinstance(other, dict)
    assert torch.equal(again["input_ids"], batch.content["input_ids"])
    assert not torch.equal(other["input_ids"], batch.content["input_ids"])  # in the same cache


def test_made_up_tokens_are_packed_mixed_and_streamed(tmp_path: Path) -> None:
    packed = dummy(tmp_path, packing="sequential", dummy={"tokens": 5, "value": 7}).batch(1)
    assert isinstance(packed.content, list)
    assert bool((packed.content[0]["input_ids"] == 7).all())
    assert packed.content[0]["position_ids"][0].tolist() == [0, 1, 2, 3, 4] * 3
    validation = {"path": "held out", "dummy": {"documents": 20, "tokens": 16}}
    mixture = [{"path": "a", "weight": 1}, {"path": "b", "weight": 1, "dummy": {"tokens": 16, "value": 3}}]
    streamed = dummy(tmp_path, streaming={"buffer": 2}, validation=validation, mixture=mixture).batch(1)
    assert isinstance(streamed.content, dict)
    ids = streamed.content["input_ids"]
    assert 0 < int((ids == 3).all(1).sum()) < len(ids)


def test_made_up_tokens_that_are_refused(tmp_path: Path) -> None:
    with refuses(DataError, rule="token id 300"):
        dummy(tmp_path, dummy={"value": 300})
    with pytest.raises(ValueError, match=r"data.dummy with data.kind=text"):
        dummy(tmp_path, kind="text", path="x", dummy={"seed": 1})
    with pytest.raises(ValueError, match="tokens"):
        dummy(tmp_path, dummy={"tokens": 1})


@pytest.mark.parametrize("streaming", [None, {"buffer": 1}])
@pytest.mark.parametrize("overlong", ["truncate", "drop"])
def test_rows_too_short_for_any_answer_are_to_be_longer(
    tmp_path: Path, overlong: str, streaming: dict[str, int] | None
) -> None:
    """0.5.0: "lower data.sequence_length", which cuts off more answers. Their rows are too short."""
    row = {"messages": [{"role": "user", "content": "x" * 60}, {"role": "assistant", "content": "y"}]}
    long, short = jsonl(tmp_path / "a.jsonl", [row] * 12), chats(tmp_path / "b.jsonl", 12)
    keys: dict[str, Any] = {"kind": "chat", "overlong": overlong}
    if streaming:
        said = refused(config(path=long, validation={"path": short}, streaming=streaming, **keys))
    else:
        said = refused(config(path=long, **keys))
        assert f"12 of its 12 documents are left out, as data.overlong={overlong} with 40 tokens" in said
        assert "the longest has 8" in said
    for text in (said, refused(config(path=short, validation={"path": long}, **keys))):
        assert "Raise data.sequence_length" in text
        assert "lower" not in text


@pytest.mark.parametrize("indent", [None, 2])
def test_a_list_in_a_file_of_lines_is_read_as_one(tmp_path: Path, indent: int | None) -> None:
    """0.5.0: "line 1: it is not JSON: Expecting value", of a JSON list whose file is called .jsonl."""
    lines = chats(tmp_path / "a.jsonl", 12)
    rows_of = [json.loads(line) for line in Path(lines).read_text().splitlines()]
    (tmp_path / "b.jsonl").write_text(json.dumps(rows_of, indent=indent))
    one, other = (load(config(path=str(tmp_path / name), kind="chat")) for name in ("a.jsonl", "b.jsonl"))
    assert everything(one) == everything(other)
    (tmp_path / "c.jsonl").write_text(json.dumps([*rows_of, 3], indent=indent))
    assert "c.jsonl entry 13: each entry of the list is an object, and this is a int" in refused(
        config(path=str(tmp_path / "c.jsonl"), kind="chat")
    )


def test_a_table_says_nothing_with_nothing(tmp_path: Path) -> None:
    """A table has each key of any message in all of them, and None where a message lacks it."""
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0},
             {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]  # fmt: skip
    chat: list[dict[str, Any]] = [
        {"messages": turns, "system": None},
        {"messages": turns[2:], "system": "s"},
    ] * 6
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(chat), tmp_path / "a.parquet")
    lines = jsonl(tmp_path / "a.jsonl", chat)
    one, other = (
        load(config(path=path, kind="chat", sequence_length=99))
        for path in (lines, str(tmp_path / "a.parquet"))
    )
    assert everything(one) == everything(other)
    tagged = [{**row, "id": number} for number, row in enumerate(chat)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(tagged), tmp_path / "b.parquet")
    assert 'ignored_fields: ["id"]' in refused(config(path=str(tmp_path / "b.parquet"), kind="chat"))
    path = str(tmp_path / "b.parquet")
    listed = load(config(path=path, kind="chat", sequence_length=99, ignored_fields=["id"]))
    assert everything(listed) == everything(one)
    masked = pyarrow.Table.from_pylist([{**row, "completion_mask": [0] * 3} for row in ROWS])
    pyarrow.parquet.write_table(masked, tmp_path / "c.parquet")
    for kind in ("tokens", "auto"):
        assert "nothing reads 'completion_mask'" in refused(
            config(path=str(tmp_path / "c.parquet"), kind=kind)
        )
