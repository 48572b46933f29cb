"""Tokens on disk: built once and whole or not at all; and Megatron's files, read as they are."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.errors import ConfigError, DataError
from penstock.train.config.sections import SourceSection
from penstock.train.data.sources import open_source
from penstock.train.data.store import Cache, forget, open_store, read_index, write_megatron, write_store
from penstock.train.encoding.chat import Encoded
from penstock.train.encoding.encode import Block


def encoded(ids: list[int], labels: list[int] | None = None) -> Encoded:
    return Encoded(np.array(ids, np.uint32), None if labels is None else np.array(labels, np.int32))


def test_documents_are_written_end_to_end_with_separators_between(tmp_path: Path) -> None:
    blocks: list[Block] = [[("a", encoded([1, 2])), ("b", encoded([]))], [("c", None), ("d", encoded([200]))]]
    write_store(tmp_path, blocks, np.uint8, labelled=False, separator=0)
    store = open_store(tmp_path)
    assert store.tokens.tolist() == [1, 2, 0, 0, 200]
    assert store.lengths.tolist() == [3, 1, 1]
    assert store.tokens.dtype == np.uint8
    assert store.labels is None
    facts = store.facts
    assert (facts.documents, facts.tokens, facts.counted, facts.dropped) == (3, 5, 5, 1)
    assert (facts.highest, facts.at, facts.longest) == (200, "d", 3)


def test_labels_are_kept_where_some_token_does_not_count(tmp_path: Path) -> None:
    found = []
    for number, labels in enumerate(([5, 6], [-100, 6], [5, 9])):
        folder = tmp_path / str(number)
        folder.mkdir()
        write_store(folder, [[("a", encoded([5, 6], labels))]], np.uint16, labelled=True, separator=None)
        store = open_store(folder)
        assert (store.labels is None) == (number == 0)
        assert store.read(0, 2)[1].tolist() == labels
        assert store.facts.counted == (1 if number == 1 else 2)
        found.append(store.facts.digest)
        forget([store.tokens, store.labels])
        assert store.read(0, 2)[0].tolist() == [5, 6]
    assert open_store(tmp_path / "2").facts.highest == 9
    assert len(set(found)) == 3


def test_one_builds_and_the_others_wait_for_it(tmp_path: Path) -> None:
    built: list[int] = []

    def build(folder: Path) -> None:
        built.append(1)
        time.sleep(0.1)
        (folder / "made").write_text("whole")

    found: list[str] = []
    threads = [
        threading.Thread(
            target=lambda: found.append((Cache(tmp_path).entry("key", build) / "made").read_text())
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (built, found) == ([1], ["whole"] * 4)
    assert Cache(tmp_path).entry("other", build) != Cache(tmp_path).entry("key", build)


def test_a_build_that_ended_early_leaves_nothing_that_is_taken_for_whole(tmp_path: Path) -> None:
    cache = Cache(tmp_path)

    def killed(folder: Path) -> None:
        (folder / "made").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.entry("key", killed)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []

    def build(folder: Path) -> None:
        assert [path for path in tmp_path.iterdir() if path.is_dir()] == [folder]
        (folder / "made").write_text("whole")

    def first(folder: Path) -> None:
        (folder / "made").write_text("first")

    key = cache.entry("key", first).name
    (tmp_path / key).rename(tmp_path / f"{key}.building-99")  # as a kill leaves it
    assert (cache.entry("key", build) / "made").read_text() == "whole"
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [key]


def test_a_cache_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        ConfigError, match=r"data.cache=.*file: tokens are kept there.*Give a folder of yours"
    ):
        Cache.at(str(tmp_path / "file"))

    def full(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(ConfigError, match="No space left on device"):
        Cache(tmp_path).entry("key", full)


def test_a_changed_file_has_another_digest_and_a_known_one_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, cache = tmp_path / "a.txt", Cache(tmp_path / "cache")
    cache.folder.mkdir()
    file.write_text("first")
    source = open_source(SourceSection(path=str(file)))
    first = cache.digest(source)
    assert list(cache.folder.iterdir()) == []  # its time stamp may yet stay the same over a change
    old = time.time() - 60
    os.utime(file, (old, old))
    assert cache.digest(source) == first
    monkeypatch.setattr(type(source), "digest", None)
    assert cache.digest(source) == first
    monkeypatch.undo()
    file.write_text("other")
    assert cache.digest(source) != first


# ---- Megatron


def write(folder: Path, documents: list[list[list[int]]], dtype: Any = np.uint16, code: int = 8) -> Path:
    """NAME.bin and NAME.idx of documents, each some sequences, as Megatron writes them."""
    sequences = [np.array(sequence, dtype) for document in documents for sequence in document]
    lengths = np.array([len(sequence) for sequence in sequences], np.int32)
    pointers = (np.cumsum(lengths, dtype=np.int64) - lengths) * np.dtype(dtype).itemsize
    bounds = np.cumsum([0, *map(len, documents)], dtype=np.int64)
    header = b"MMIDIDX\x00\x00" + (1).to_bytes(8, "little") + bytes([code])
    header += len(sequences).to_bytes(8, "little") + len(bounds).to_bytes(8, "little")
    (folder / "data_text_document.bin").write_bytes(b"".join(each.tobytes() for each in sequences))
    index = header + lengths.tobytes() + pointers.tobytes() + bounds.tobytes()
    (folder / "data_text_document.idx").write_bytes(index)
    return folder / "data_text_document"


DOCUMENTS = [[[1, 2, 3], [4]], [[5, 6]], [[7, 300, 9, 10]]]


@pytest.mark.parametrize(("dtype", "code"), [(np.uint16, 8), (np.int32, 4), (np.int64, 5)])
def test_megatron_s_files_are_read_where_they_lie(tmp_path: Path, dtype: Any, code: int) -> None:
    prefix = write(tmp_path, DOCUMENTS, dtype, code)
    for path in (f"{prefix}.bin", f"{prefix}.idx"):
        assert open_source(SourceSection(path=path)).format == "megatron"
    source = open_source(SourceSection(path=str(prefix), kind="megatron"))
    (tmp_path / "made").mkdir()
    write_megatron(tmp_path / "made", source)
    store = open_store(tmp_path / "made")
    assert store.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 300, 9, 10]
    assert store.tokens.dtype == dtype
    assert store.lengths.tolist() == [4, 2, 4]
    assert (store.facts.highest, store.facts.at) == (300, f"{prefix}.bin document 2")
    assert not (tmp_path / "made" / "tokens").exists()


def corrupt_index(folder: Path, change: Any) -> str:
    prefix = write(folder, DOCUMENTS)
    index, binary = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    index.write_bytes(change(index.read_bytes()))
    with pytest.raises(DataError) as caught:
        read_index(index, binary)
    assert str(index) in caught.value.value
    assert "preprocess_data.py" in caught.value.remedy
    return caught.value.rule


def test_a_corrupt_index_is_refused(tmp_path: Path) -> None:
    assert "begins with" in corrupt_index(tmp_path, lambda old: b"TNTIDX" + old[6:])
    assert "within its header" in corrupt_index(tmp_path, lambda old: old[:20])
    assert "version 2" in corrupt_index(tmp_path, lambda old: old[:9] + b"\x02" + old[10:])
    assert "dtype 6" in corrupt_index(tmp_path, lambda old: old[:17] + b"\x06" + old[18:])
    assert "and it has" in corrupt_index(tmp_path, lambda old: old[:-1])
    assert "end to end" in corrupt_index(tmp_path, lambda old: old[:34] + b"\x02" + old[35:])
    assert "in order" in corrupt_index(tmp_path, lambda old: old[:-8] + b"\x09" + old[-7:])
    prefix = write(tmp_path, DOCUMENTS)
    Path(f"{prefix}.bin").write_bytes(b"\x01\x00")
    with pytest.raises(DataError, match=r"it counts 20 bytes, and data_text_document.bin has 2"):
        read_index(Path(f"{prefix}.idx"), Path(f"{prefix}.bin"))
    Path(f"{prefix}.bin").unlink()
    with pytest.raises(DataError, match="cannot be read"):
        read_index(Path(f"{prefix}.idx"), Path(f"{prefix}.bin"))


def test_negative_tokens_are_refused(tmp_path: Path) -> None:
    source = open_source(SourceSection(path=f"{write(tmp_path, [[[1, -2]]], np.int32, 4)}.bin"))
    with pytest.raises(DataError, match="token ids are 0 or more, and it holds -2"):
        write_megatron(tmp_path, source)
