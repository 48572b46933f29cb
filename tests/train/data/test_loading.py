"""Which rows a step sees, and every kind of data that is refused."""

from __future__ import annotations

import gzip
import json
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.batch.padding import Padding
from penstock.batch.placement import sent_ahead
from penstock.errors import DataError
from penstock.train.config.data import SourceSection
from penstock.train.config.sections import TrainConfig
from penstock.train.data import loading, sources
from penstock.train.data.loading import Data, LoadedBatch, load_data
from penstock.train.data.packing import PACKINGS, Packing, Pieces, one_each
from penstock.train.data.rows import Fill, SourceRows, StoredRows, StreamLayout
from penstock.train.data.sampler import Mixture, Sampler
from penstock.train.data.sources import open_source
from penstock.train.encoding.tokenizer import ByteTokenizer
from penstock.train.sizes import Size, StepSizes
from support.refusals import refuses
from support.stores import in_memory


def config(path: Path, **data: Any) -> TrainConfig:
    section = {"path": str(path), "tokenizer": "bytes", "sequence_length": 4, **data}
    train = {"batch_size": 2, "seed": 3}
    model = {"config": {"model_type": "qwen3"}}
    return TrainConfig.model_validate(
        {"model": model, "data": section, "train": train, "pipeline": {"microbatches": 2}}
    )


def load(path: Path, vocabulary: int = 256, padding: Padding | None = None, **data: Any) -> Data:
    return load_data(config(path, **data), ByteTokenizer(), vocabulary, padding=padding)


def refused(path: Path, vocabulary: int = 256, **data: Any) -> str:
    with pytest.raises(DataError) as caught:
        load(path, vocabulary, **data)
    assert caught.value.exit_code == 2
    return str(caught.value)


def of_rows(rows: int, length: int, microbatches: int = 2) -> StepSizes:
    return StepSizes((), Size(rows, length, (microbatches,)))


def rows_of(count: int, held_out: int = 2, seed: int = 0) -> Data:
    """`count` rows of three tokens, 0 to 2, 3 to 5, ..., in batches of two."""
    store = in_memory(np.arange(count * 3, dtype=np.uint8), [count * 3])

    def rows(first: int, end: int) -> StoredRows:
        starts = np.arange(first, end) * 3
        pieces = Pieces(starts, np.full_like(starts, 3))
        return StoredRows((SourceRows(store, pieces, one_each(starts, 3)),))

    trained = count - held_out
    sampler = Sampler(Mixture((1.0,), (None,)), (trained,), seed)
    return Data(rows(0, trained), rows(trained, count), StreamLayout(), of_rows(2, 3), sampler)


def stream(data: Data) -> bytes:
    """All rows of a stream, with those held out."""
    found = [rows.read(row) for rows in (data.rows, data.held_out) for row in range(len(rows))]
    return b"".join(bytes(piece.ids.tolist()) for row in found for piece in row)


def whole(batch: LoadedBatch) -> dict[str, Tensor]:
    assert isinstance(batch.content, dict)
    return batch.content


def test_an_epoch_sees_every_row_once_and_none_that_is_held_out() -> None:
    rows = rows_of(11)  # 9 rows to train on, in batches of 2: epochs end within a batch
    seen = torch.cat([whole(rows.batch(step))["input_ids"] for step in range(1, 10)])
    first, second = seen[:9], seen[9:]
    expected = torch.arange(27).reshape(9, 3)
    for epoch in (first, second):
        assert torch.equal(epoch[epoch[:, 0].argsort()], expected)
    assert not torch.equal(first, second)
    assert not torch.equal(first, expected)


def test_a_batch_follows_from_its_step_alone() -> None:
    forwards = [whole(rows_of(11).batch(step))["input_ids"] for step in range(1, 20)]
    rows = rows_of(11)
    for step in reversed(range(1, 20)):
        assert torch.equal(whole(rows.batch(step))["input_ids"], forwards[step - 1])
    assert not torch.equal(whole(rows_of(11, seed=1).batch(1))["input_ids"], forwards[0])


def test_batches_are_those_of_the_steps_wherever_they_begin() -> None:
    rows, cpu = rows_of(11), torch.device("cpu")
    expected = [whole(rows.batch(step))["input_ids"] for step in range(1, 20)]
    for first in (1, 8):
        found = [whole(batch)["input_ids"] for batch in rows.batches(range(first, 20), cpu)]
        assert len(found) == 20 - first
        assert all(map(torch.equal, found, expected[first - 1 :]))


def test_the_next_batch_is_made_while_one_is_in_use_and_no_further_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []
    second = threading.Event()
    original = Data.batch

    def batch(data: Data, step: int) -> LoadedBatch:
        assert threading.current_thread() is not threading.main_thread()
        made.append(step)
        if step == 2:
            second.set()
        return original(data, step)

    monkeypatch.setattr(Data, "batch", batch)
    batches = rows_of(11).batches(range(1, 20), torch.device("cpu"))
    next(batches)
    assert second.wait(30)
    batches.close()
    assert made == [1, 2]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("penstock-data")]


def test_a_failed_batch_is_raised_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Data.batch

    def batch(data: Data, step: int) -> LoadedBatch:
        if step == 3:
            raise DataError("row 7", "it cannot be read", "Mend it")
        return original(data, step)

    monkeypatch.setattr(Data, "batch", batch)
    batches = rows_of(11).batches(range(1, 20), torch.device("cpu"))
    assert next(batches)
    assert next(batches)
    with refuses(DataError, "row 7"):
        next(batches)


def test_a_batch_for_a_gpu_is_pinned_and_sent_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the thread, on the GPU of the pipeline. torch's own part is emulated."""
    calls: list[object] = []

    class Copies:
        def __init__(self, device: torch.device) -> None:
            calls.append(device)

        def up(self, hosts: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], None]:
            calls.append(threading.current_thread().name[:12])
            return tuple(host + 1 for host in hosts), None

    def pin(tensor: Tensor) -> Tensor:
        calls.append(tensor.shape)
        return tensor + 1

    monkeypatch.setattr(Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(loading, "CudaCopies", Copies)
    (batch,) = rows_of(11).batches(range(1, 2), torch.device("cuda", 3))
    device = torch.device("cuda", 3)
    assert calls == [device, device, (2, 3), (2, 3), "penstock-dat"]
    labels = whole(batch)["labels"]
    assert torch.equal(labels, whole(rows_of(11).batch(1))["labels"] + 1)
    sent = sent_ahead(labels, torch.device("cpu"))
    assert sent is not None
    assert torch.equal(sent, labels + 1)


def test_a_batch_is_what_transformers_takes() -> None:
    batch = whole(rows_of(11).batch(1))
    assert batch["input_ids"].shape == (2, 3)
    assert batch["input_ids"].dtype == torch.int64
    assert torch.equal(batch["input_ids"], batch["labels"])
    assert batch["input_ids"].data_ptr() != batch["labels"].data_ptr()


def test_held_out_batches_are_spread_over_the_held_out_rows() -> None:
    rows = rows_of(20, held_out=9)
    (batch,) = rows.held_out_batches(1)
    assert whole(batch)["input_ids"][:, 0].tolist() == [33, 57]
    assert [len(whole(batch)["input_ids"]) for batch in rows.held_out_batches(100)] == [2, 2, 2, 2, 1]
    starts = torch.cat([whole(batch)["input_ids"][:, 0] for batch in rows.held_out_batches(100)])
    assert starts.min() == 33
    assert len(set(starts.tolist())) == 9


def test_held_out_rows_that_make_no_whole_batch_are_batches_of_about_one_size() -> None:
    data = replace(rows_of(40, held_out=11), sizes=of_rows(8, 3))
    sizes = [len(whole(batch)["input_ids"]) for batch in data.held_out_batches(4)]
    assert sizes == [6, 5]
    for parts in (2, 4):  # of the smaller one too, each part has as many microbatches
        dealt = [replace(data, parts=parts, part=part).held_out_batches(4)[1] for part in range(parts)]
        assert sum(len(whole(batch)["input_ids"]) for batch in dealt) == 5


@pytest.mark.parametrize("packing", ["none", "best_fit"])
def test_a_part_without_a_held_out_row_gets_one_in_which_no_token_counts(
    tmp_path: Path, packing: str
) -> None:
    data = load_texts(tmp_path / "a.jsonl", TEXTS, packing, held_out_from="end")
    data = replace(data, held_out=replace(data.held_out, sources=(one_row(data.held_out.sources[0]),)))
    dealt = [replace(data, parts=3, part=part).held_out_batches(4) for part in range(3)]
    counts = [[int((part["labels"] >= 0).sum()) for part in microbatches(batch)] for (batch,) in dealt]
    assert [len(of_part) for of_part in counts] == [1, 1, 1]
    assert sorted(sum(of_part) for of_part in counts)[:2] == [0, 0]
    (alone,) = data.held_out_batches(4)
    assert sum(sum(of_part) for of_part in counts) == sum(
        int((part["labels"] >= 0).sum()) for part in microbatches(alone)
    )


def one_row(source: SourceRows) -> SourceRows:
    bounds = source.packing.bounds
    return replace(source, packing=Packing(source.packing.pieces[: bounds[1]], bounds[:2]))


def test_a_text_file_is_cut_into_rows_and_the_rest_is_left(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"abcdefghijklmnopqrstuvwxyz")
    data = load(tmp_path / "a.txt")
    assert stream(data) == b"abcdefghijklmnopqrstuvwx"
    assert (len(data.rows), len(data.held_out)) == (4, 2)


def test_a_folder_is_read_in_sorted_order_within_its_patterns(tmp_path: Path) -> None:
    for name in ("b/a.py", "a.py", "b.py", "b/skip/x.py", "skip.py", "notes.md", "b/c.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    section = config(tmp_path, include=["*.py"], exclude=["skip", "skip.py"]).data
    records = open_source(section.sources[0]).records()
    found = [(Path(name).relative_to(tmp_path).as_posix(), text) for name, text in records]
    assert found == [(n, n.encode()) for n in ("a.py", "b/a.py", "b/c.py", "b.py")]
    rows = load(tmp_path, include=["*.py"], exclude=["skip", "skip.py"])
    assert stream(rows) == b"a.py\0b/a.py\0b/c.py\0b.py"[:20]


def test_no_file_of_a_folder_is_left_out_unseen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """0.5.0: links that lead nowhere or to another folder, pipes and folders that this user may not list were
    left out, and the rest trained; a folder that vanished was a traceback. rglob and is_file() say nothing.
    """
    folder, other = tmp_path / "folder", tmp_path / "other"
    for name in ("folder/a.txt", "folder/b/c.txt", "other/d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text of " + name)
    (folder / "again").symlink_to("b")  # is read where it lies
    assert stream(load(folder)) == b"text of folder/a.txt\0text of folder/b/c.txt"[:40]
    for make, rule in (
        (lambda odd: odd.symlink_to("nowhere"), "No such file or directory"),
        (lambda odd: odd.symlink_to("odd"), "Too many levels of symbolic links"),
        (lambda odd: odd.symlink_to(other), "it is a link to another folder, which is not followed"),
        (os.mkfifo, "it is a pipe, and no regular file"),
    ):
        make(folder / "odd")
        said = refused(folder)
        assert f"data file {folder / 'odd'}: " in said
        assert rule in said
        load(folder, exclude=["odd"])
        (folder / "odd").unlink()
    listed = os.scandir

    def scandir(path: str) -> Any:
        if str(path).endswith("b"):
            raise PermissionError(13, "Permission denied", path)
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert f"data file {folder / 'b'}: it cannot be read (Permission denied)" in refused(folder)


def test_packed_files_are_refused_by_name(tmp_path: Path) -> None:
    """0.5.0: gzip was "not JSON", or trained byte by byte, and left out unseen in a folder: no one looked."""
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n' * 9)
    packed = gzip.compress((tmp_path / "a.jsonl").read_bytes())
    (tmp_path / "b.jsonl.gz").write_bytes(packed)
    for path, kind in (
        (tmp_path, "jsonl"),
        (tmp_path / "b.jsonl.gz", "jsonl"),
        (tmp_path / "b.jsonl.gz", "auto"),
    ):
        assert "b.jsonl.gz: it is compressed, and files are read as they are. Decompress it" in refused(
            path, kind=kind
        )


def test_what_auto_takes_for_records(tmp_path: Path) -> None:
    """0.5.0: a .json file and a folder of JSONL were trained as they are spelled, with all brackets: only the
    suffix of a single .jsonl was looked at.
    """
    (tmp_path / "a.json").write_text('[{"text": "first"}, {"text": "second"}, {"text": "third"}]')
    expected = b"first\0second\0third"[:16]
    assert stream(load(tmp_path / "a.json")) == stream(load(tmp_path)) == expected
    (tmp_path / "b.jsonl").write_text('{"text": "fourth"}\n')
    assert stream(load(tmp_path))[:16] == expected
    assert stream(load(tmp_path, kind="text"))[:10] == b'[{"text": '


def test_jsonl_and_a_dataset_give_the_same_rows(tmp_path: Path) -> None:
    texts = ["first document", "", "zweites Döküment"]
    lines = "\n\n".join(json.dumps({"id": 1, "body": text}, ensure_ascii=False) for text in texts)
    (tmp_path / "a.jsonl").write_text(lines, encoding="utf-8")
    datasets.Dataset.from_dict({"body": texts}).save_to_disk(tmp_path / "set")
    rows = load(tmp_path / "a.jsonl", text_field="body")
    again = load(tmp_path / "set", text_field="body")
    assert stream(rows) == stream(again) == "\0".join(texts).encode()[:32]


def test_what_is_not_there_or_empty_is_refused(tmp_path: Path) -> None:
    assert "there is no such file or folder" in refused(tmp_path / "nowhere")
    (tmp_path / "empty").touch()
    assert "it holds no text" in refused(tmp_path / "empty")
    (tmp_path / "folder").mkdir()
    assert "no file below it matches" in refused(tmp_path / "folder")
    (tmp_path / "folder" / "a.txt").write_text("text")
    assert "matches data.include=['*.py']" in refused(tmp_path / "folder", include=["*.py"])
    (tmp_path / "empty.jsonl").write_text("\n\n")
    assert "it holds no text" in refused(tmp_path / "empty.jsonl")


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 11)
    assert "of 11 tokens: it gives 2 rows of 4" in refused(tmp_path / "a")
    (tmp_path / "a").write_bytes(b"x" * 12)
    assert len(stream(load(tmp_path / "a"))) == 12


def test_an_id_that_the_model_does_not_have_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x" * 16)
    assert "token id 120 and the model has ids 0 to 119" in refused(tmp_path / "a", vocabulary=120)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"\xff\x00\x01\x80", "line 2: it is not JSON"),
        (b'{"text": ', "line 2: it is not JSON"),
        (b'"text"', "line 2: each line is a JSON object"),
        (b'{"texts": "x"}', "line 2: it has no field 'text', only 'texts'"),
        (b'{"text": 3}', "line 2: text holds a int and no text"),
        (b'{"text": "\\ud800"}', "line 2: text is not Unicode text"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "good"}\n' + line)
    found = refused(tmp_path / "a.jsonl")
    assert message in found
    assert f"data file {tmp_path / 'a.jsonl'} line 2" in found
    assert "Mend it, or remove it" in found


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json", "a.parquet", "a.bin"])
@pytest.mark.parametrize("device", [True, False], ids=["a device", "a pipe"])
def test_what_is_no_file_is_refused_unopened(tmp_path: Path, name: str, device: bool) -> None:
    """0.5.0: a pipe was waited for without end, and a device filled the memory: both exist, as files do."""
    path = tmp_path / name
    path.symlink_to("/dev/zero") if device else os.mkfifo(path)
    assert f"it is a {'device' if device else 'pipe'}, and no regular file" in refused(path)


def test_a_record_that_nests_too_deep_is_named(tmp_path: Path) -> None:
    """0.5.0: it was a RecursionError of Python's reader of JSON."""
    deep = '{"text": ' + "[" * 100_000
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n' + deep)
    assert "line 2: it is not JSON: its lists and objects nest deeper" in refused(tmp_path / "a.jsonl")
    (tmp_path / "a.json").write_text('[{"text": "good"}, ' + deep)
    assert "entry 2: it is not JSON: its lists" in refused(tmp_path / "a.json", kind="jsonl")


# _LONGEST, _READ: shorter records are too long
def test_a_record_of_json_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """0.5.0: a line was read whole, however long: here of a file of a terabyte."""
    monkeypatch.setattr(sources, "_LONGEST", 1 << 16)
    monkeypatch.setattr(sources, "_READ", 1 << 10)
    for name, start in (("a.jsonl", ""), ("a.json", "[ ")):
        (tmp_path / name).write_text(start + '{"text": "')
        os.truncate(tmp_path / name, 1 << 40)
        with pytest.raises(DataError, match=r"(line|entry) 1: (a record has 64 KiB at most|it is not JSON)"):
            next(open_source(SourceSection(path=str(tmp_path / name), kind="jsonl")).records())


# _READ: reads of a few bytes end within an entry
@pytest.mark.parametrize("read", [1, 7, 1 << 20])
def test_the_entries_of_a_list_are_parsed_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: int
) -> None:
    """0.5.0: all of them at once, so that 90 MB of empty lists took 2.5 GB before the first was refused."""
    monkeypatch.setattr(sources, "_READ", read)
    file = tmp_path / "a.json"

    def entries(text: str) -> list[Any]:
        file.write_text(text)
        return [each.content for each in open_source(SourceSection(path=str(file), kind="jsonl")).records()]

    found = [{"a": n, "b": [{"text": "ä, ]"}]} for n in range(20)]
    assert entries(json.dumps(found, indent=1)) == entries(json.dumps(found)) == found
    assert entries(" [ ] ") == []
    for text, message in (
        ("[[]" + ", []" * 10_000, "entry 1: each entry of the list is an object"),
        ('[{"a": 1}', "entry 2: it is not JSON: a list goes on"),
        ('[{"a": 1} {', "entry 2: it is not JSON: a list goes on"),
        ('[{"a": 1}, ', "entry 2: it is not JSON"),
        ('[{"a": 1}] x', "entry 2: it is not JSON: a list goes on with a comma, or ends"),
        ("[1234567890]", "entry 1: each entry of the list is an object"),
    ):
        with pytest.raises(DataError, match=message):
            entries(text)


def test_where_the_first_line_has_no_text_the_field_may_be_another(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"body": "good"}\n')
    assert "set data.text_field to the one that holds the text" in refused(tmp_path / "a.jsonl")


def test_a_wrong_dataset_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = datasets.Dataset.from_dict({"text": ["x"]})
    datasets.DatasetDict({"train": one, "test": one}).save_to_disk(tmp_path / "splits")
    assert "it holds several splits (train, test)" in refused(tmp_path / "splits")
    assert "it has no field 'body', only 'text'" in refused(tmp_path / "splits" / "train", text_field="body")
    (tmp_path / "splits" / "train" / "state.json").write_text("{")
    assert "datasets cannot load it" in refused(tmp_path / "splits" / "train")
    assert "and ends in .jsonl" in refused(tmp_path, kind="jsonl")
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install 'penstock[datasets]'" in refused(tmp_path / "splits")


def test_a_file_without_permission_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_text("x" * 16)

    def refuse(path: str | Path, *flags: int) -> int:  # root may read any file, so its mode would not do
        if Path(path) == tmp_path / "a":
            raise PermissionError(13, "Permission denied")
        return plain(path, *flags)

    plain = os.open
    monkeypatch.setattr(os, "open", refuse)
    assert "it cannot be read (Permission denied)" in refused(tmp_path / "a")


def microbatches(batch: LoadedBatch) -> list[dict[str, Any]]:
    assert isinstance(batch.content, list)
    return batch.content


def parts_of(data: Data, parts: int, step: int) -> list[LoadedBatch]:
    return [replace(data, parts=parts).of(part).batch(step) for part in range(parts)]


def test_the_parts_of_a_batch_are_the_batch_that_one_process_has() -> None:
    for rows, parts in ((8, 2), (7, 2), (9, 4)):
        data = replace(rows_of(40, held_out=10), sizes=of_rows(rows, 3))
        for step in (1, 5, 9):
            dealt = parts_of(data, parts, step)
            together = torch.cat([whole(batch)["input_ids"] for batch in dealt])
            assert torch.equal(together, whole(data.batch(step))["input_ids"])
            assert {batch.fill for batch in dealt} == {data.batch(step).fill}
        held = [replace(data, parts=parts, part=part).held_out_batches(1)[0] for part in range(parts)]
        together = torch.cat([whole(batch)["input_ids"] for batch in held])
        assert torch.equal(together, whole(data.held_out_batches(1)[0])["input_ids"])


def load_texts(path: Path, texts: list[str], packing: str, **more: Any) -> Data:
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return load(path, **{"sequence_length": 16, "packing": packing, **more})


def documents_in(batches: list[LoadedBatch]) -> list[tuple[list[int], list[int]]]:
    """The tokens and labels of every row, sorted, without padding."""
    return sorted(
        (ids[labels != -100].tolist(), labels[labels != -100].tolist())
        for batch in batches
        for microbatch in microbatches(batch)
        for ids, labels in zip(microbatch["input_ids"], microbatch["labels"], strict=True)
    )


@pytest.mark.parametrize("packing", PACKINGS)
def test_documents_are_dealt_out_whole_and_each_part_gets_long_ones(tmp_path: Path, packing: str) -> None:
    texts = ["abcdefghijklmnopqrst"[: 2 + number % 17] for number in range(300)]
    data = load_texts(tmp_path / "a.jsonl", texts, packing, sequence_length=18)
    data = replace(data, sizes=of_rows(16, 18))

    for step in (1, 4):
        dealt = parts_of(data, 2, step)
        assert documents_in(dealt) == documents_in([data.batch(step)])
        assert [len(microbatches(batch)) for batch in dealt] == [2, 2]
        own = [sum(microbatch["input_ids"].numel() for microbatch in microbatches(batch)) for batch in dealt]
        assert dealt[0].fill == dealt[1].fill
        assert dealt[0].fill.slots == sum(own)
        assert max(own) <= 1.2 * min(own)
    assert replace(data, parts=2).expected(3).tokens == data.expected(3).tokens


# each of one letter, which shows where its tokens went
TEXTS = [chr(ord("A") + number) * (2 + number % 11) for number in range(50)]


def letters(batches: list[LoadedBatch]) -> set[str]:
    ids = [each["input_ids"].flatten() for batch in batches for each in microbatches(batch)]
    return {chr(token) for token in torch.cat(ids).tolist() if token}


@pytest.mark.parametrize("packing", PACKINGS)
def test_the_last_documents_are_held_out_and_never_trained_on(tmp_path: Path, packing: str) -> None:
    data = load_texts(tmp_path / "a.jsonl", TEXTS, packing, held_out=0.3, held_out_from="end")
    epoch = -(-len(data.rows) // 2)
    trained = letters([data.batch(step) for step in range(1, epoch + 1)])
    held = letters([LoadedBatch(data.layout.content(data.held_out, range(len(data.held_out))), Fill())])
    assert sorted(trained | held) == [text[0] for text in TEXTS]
    assert max(trained) < min(held)
    share = sum(len(text) for text in TEXTS if text[0] in held) / sum(map(len, TEXTS))
    assert share == pytest.approx(0.3, abs=0.05)
    assert len(data.held_out_batches(3)) == 3


@pytest.mark.parametrize("packing", PACKINGS)
def test_random_documents_are_held_out_by_the_seed(tmp_path: Path, packing: str) -> None:
    def split(seed: int = 0, **keys: Any) -> tuple[set[str], set[str], str]:
        load_texts(tmp_path / "a.jsonl", TEXTS, packing)  # writes the file
        keys |= {"sequence_length": 16, "packing": packing, "held_out": 0.3}
        made = config(tmp_path / "a.jsonl", **keys)
        made = made.model_copy(update={"train": made.train.model_copy(update={"seed": seed})})
        data = load_data(made, ByteTokenizer(), 256)
        trained, held = (letters([LoadedBatch(data.layout.content(rows, range(len(rows))), Fill())])
              for rows in (data.rows, data.held_out))  # fmt: skip
        return trained, held, data.digest

    trained, held, digest = split()
    assert sorted(trained | held) == [text[0] for text in TEXTS]
    assert not trained & held
    assert max(trained) > min(held)  # not the end
    assert split() == (trained, held, digest)
    assert split(seed=1)[1] != held
    end = split(held_out_from="end")
    assert min(end[1]) > max(end[0])
    assert len({digest, split(seed=1)[2], end[2]}) == 3  # a resumed run notices another split
    assert split(seed=1, held_out_from="end")[2] == end[2]


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_whole_batch_is_held_out_however_small_the_share(tmp_path: Path, packing: str) -> None:
    data = load_texts(tmp_path / "a.jsonl", TEXTS, packing, held_out=0.001)
    assert 2 <= len(data.held_out) < len(data.rows)
    assert len(data.held_out_batches(9)) >= 1


def test_too_few_rows_are_refused(tmp_path: Path) -> None:
    wanted = "rows of at most 16, and a batch of 2 to train on and a row held out"
    with pytest.raises(DataError, match=wanted):
        load_texts(tmp_path / "a.jsonl", ["ab", "cd"], "none")
    assert len(load_texts(tmp_path / "a.jsonl", ["ab", "cd", "ef"], "none").held_out) == 1
    with refuses(DataError, rule="it gives 0 rows"):
        load_texts(tmp_path / "a.jsonl", ["a"], "best_fit")


@pytest.mark.parametrize("packing", ["sequential", "best_fit"])
def test_a_batch_follows_from_its_step_and_not_from_the_microbatches(tmp_path: Path, packing: str) -> None:
    data, again = (load_texts(tmp_path / name, TEXTS, packing) for name in ("a.jsonl", "b.jsonl"))
    for step in (7, 1, 30):
        for one, other in zip(*map(microbatches, (data.batch(step), again.batch(step))), strict=True):
            assert all(torch.equal(one[name], other[name]) for name in one)
    one_part = replace(data, sizes=of_rows(2, 16, microbatches=1))
    assert letters([one_part.batch(5)]) == letters([data.batch(5)])


def test_the_expected_fill_is_that_of_the_first_steps(tmp_path: Path) -> None:
    data = load_texts(tmp_path / "a.jsonl", TEXTS, "sequential")
    fills = [data.batch(step).fill for step in (1, 2, 3)]
    assert data.expected(3) == fills[0] + fills[1] + fills[2]
    assert data.expected(10**9) == data.expected(100)
