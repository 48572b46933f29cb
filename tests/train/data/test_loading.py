"""What files a run reads, and every kind of data that is refused."""

from __future__ import annotations

import gzip
import json
import os
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest

from penstock.errors import DataError
from penstock.train.config.data import SourceSection
from penstock.train.data import sources
from penstock.train.data.batches import Data
from penstock.train.data.sources import open_source
from support.refusals import refuses
from support.texts import config, load, load_texts


def refused(path: Path, vocabulary: int = 256, **data: Any) -> str:
    with pytest.raises(DataError) as caught:
        load(path, vocabulary, **data)
    assert caught.value.exit_code == 2
    return str(caught.value)


def stream(data: Data) -> bytes:
    """All rows of a stream, with those held out."""
    found = [rows.read(row) for rows in (data.rows, data.held_out) for row in range(len(rows))]
    return b"".join(bytes(piece.ids.tolist()) for row in found for piece in row)


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
        with refuses(DataError, " 1", "64 KiB" if name == "a.jsonl" else "JSON"):
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
    for text, value in (
        ("[[]" + ", []" * 10_000, "entry 1"),
        ('[{"a": 1}', "entry 2"),
        ('[{"a": 1} {', "entry 2"),
        ('[{"a": 1}, ', "entry 2"),
        ('[{"a": 1}] x', "entry 2"),
        ("[1234567890]", "entry 1"),
    ):
        with refuses(DataError, value, "object" if value == "entry 1" else "not JSON"):
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


def test_too_few_rows_are_refused(tmp_path: Path) -> None:
    with refuses(DataError, "data.path=", "rows of at most 16"):
        load_texts(tmp_path / "a.jsonl", ["ab", "cd"], "none")
    assert len(load_texts(tmp_path / "a.jsonl", ["ab", "cd", "ef"], "none").held_out) == 1
    with refuses(DataError, rule="it gives 0 rows"):
        load_texts(tmp_path / "a.jsonl", ["a"], "best_fit")
