"""Tokens on disk: built once and whole or not at all; and Megatron's files, read as they are."""

from __future__ import annotations

import errno
import json
import os
import pickle
import random
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from penstock.errors import ConfigError, DataError, PenstockError
from penstock.train.config.data import SourceSection
from penstock.train.config.sections import TrainConfig
from penstock.train.data import loading, store
from penstock.train.data.sources import open_source
from penstock.train.data.store import (
    Cache,
    Store,
    forget,
    open_store,
    read_index,
    write_megatron,
    write_store,
)
from penstock.train.encoding.chat import Encoded
from penstock.train.encoding.encode import EncodedRecords
from penstock.train.encoding.tokenizer import ByteTokenizer
from support.mutations import mutated_bytes, mutated_json, seeded
from support.refusals import refuses


def encoded(ids: list[int], labels: list[int] | None = None) -> Encoded:
    return Encoded(np.array(ids, np.uint32), None if labels is None else np.array(labels, np.int32))


def test_documents_are_written_end_to_end_with_separators_between(tmp_path: Path) -> None:
    blocks: list[EncodedRecords] = [
        [("a", encoded([1, 2])), ("b", encoded([]))],
        [("c", None), ("d", encoded([200]))],
    ]
    write_store(tmp_path, blocks, np.uint8, labelled=False, separator=0)
    opened = open_store(tmp_path)
    assert opened.tokens.tolist() == [1, 2, 0, 0, 200]
    assert opened.lengths.tolist() == [3, 1, 1]
    assert opened.tokens.dtype == np.uint8
    assert opened.labels is None
    facts = opened.facts
    assert (facts.documents, facts.tokens, facts.counted, facts.dropped) == (3, 5, 5, 1)
    assert (facts.highest, facts.at) == (200, "d")


def test_the_record_of_the_highest_token_is_the_one_before_the_first_separator(tmp_path: Path) -> None:
    """A separator counts to the record before it. One may be higher than all that the tokenizer writes."""
    blocks: list[EncodedRecords] = [[("a", encoded([1])), ("b", encoded([2])), ("c", encoded([8]))]]
    write_store(tmp_path, blocks, np.uint8, labelled=False, separator=9)
    assert open_store(tmp_path).facts[-4:-1] == (0, 9, "a")
    write_store(tmp_path, blocks, np.uint8, labelled=False, separator=7)
    assert open_store(tmp_path).facts[-4:-1] == (0, 8, "c")


# _SMALL: small files are mapped, too
@pytest.mark.parametrize("small", [0, store._SMALL])  # bytes up to which a file is read and not mapped
def test_labels_are_kept_where_some_token_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: int
) -> None:
    monkeypatch.setattr(store, "_SMALL", small)
    found = []
    for number, labels in enumerate(([5, 6], [-100, 6], [5, 9])):
        folder = tmp_path / str(number)
        folder.mkdir()
        write_store(folder, [[("a", encoded([5, 6], labels))]], np.uint16, labelled=True, separator=None)
        opened = open_store(folder)
        assert (opened.labels is None) == (number == 0)
        assert isinstance(opened.tokens, np.memmap) == (small == 0)
        assert len(opened.tokens) == 2
        assert opened.read(0, 2)[1].tolist() == labels
        assert opened.facts.counted == (1 if number == 1 else 2)
        found.append(opened.facts.digest)
        forget([opened.tokens, opened.labels])
        assert opened.read(0, 2)[0].tolist() == [5, 6]
    assert open_store(tmp_path / "2").facts.highest == 9
    assert len(set(found)) == 3


def made(folder: Path) -> str:
    return (folder / "made").read_text()


def test_one_builds_and_the_others_wait_for_it(tmp_path: Path) -> None:
    built: list[int] = []

    def build(folder: Path) -> None:
        built.append(1)
        time.sleep(0.1)
        (folder / "made").write_text("whole")

    found: list[str] = []
    threads = [
        threading.Thread(target=lambda: found.append(Cache(tmp_path).entry("key", build, made)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (built, found) == ([1], ["whole"] * 4)
    assert Cache(tmp_path).entry("other", build, str) != Cache(tmp_path).entry("key", build, str)


def test_a_build_that_ended_early_leaves_nothing_that_is_taken_for_whole(tmp_path: Path) -> None:
    cache = Cache(tmp_path)

    def killed(folder: Path) -> None:
        (folder / "made").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.entry("key", killed, made)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []

    def build(folder: Path) -> None:
        assert [path for path in tmp_path.iterdir() if path.is_dir()] == [folder]
        (folder / "made").write_text("whole")

    def first(folder: Path) -> None:
        (folder / "made").write_text("first")

    key = cache.entry("key", first, lambda folder: folder.name)
    (tmp_path / key).rename(tmp_path / f"{key}.building-99")  # as a kill leaves it
    assert cache.entry("key", build, made) == "whole"
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [key]


def test_a_cache_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with refuses(ConfigError, f"data.cache={tmp_path / 'file'}", "nothing can be written", "data.cache="):
        Cache.at(str(tmp_path / "file"))

    def full(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    with refuses(ConfigError, rule="No space left on device"):
        Cache(tmp_path).entry("key", full, made)


# _SETTLED: a file that has just been written is known by its stamps
def test_a_changed_file_has_another_digest_and_a_known_one_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, cache = tmp_path / "a.txt", Cache(tmp_path / "cache")
    cache.folder.mkdir()
    file.write_text("first")
    source = open_source(SourceSection(path=str(file)))
    first = cache.digest(source)
    assert list(cache.folder.iterdir()) == []  # its time stamp may yet stay the same over a change
    monkeypatch.setattr(store, "_SETTLED", 0.0)
    assert cache.digest(source) == first
    with monkeypatch.context() as patch:
        patch.setattr(type(source), "digest", None)
        assert cache.digest(source) == first
    file.write_text("other")
    assert cache.digest(source) != first


# _SETTLED: a file that has just been written is known by its stamps
def test_an_edit_that_keeps_size_and_time_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """0.5.0: the tokens of the old text were trained: files were known by names, sizes and times that
    everybody can set."""
    monkeypatch.setattr(store, "_SETTLED", 0.0)
    file, cache = tmp_path / "a.txt", Cache(tmp_path)
    file.write_text("first")
    source, before = open_source(SourceSection(path=str(file))), file.stat()
    first = cache.digest(source)
    file.write_text("other")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert cache.digest(source) != first


# ---- Damage


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def a_folder_for(file: Path) -> None:
    file.unlink()
    file.mkdir()


def a_link_for(file: Path) -> None:
    file.rename(file.parent.parent / "elsewhere")
    file.symlink_to(file.parent.parent / "elsewhere")


def a_pipe_for(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "a bit": flip,
    "cut": lambda file: os.truncate(file, file.stat().st_size // 2),
    "empty": lambda file: os.truncate(file, 0),
    "longer": lambda file: file.write_bytes(file.read_bytes() + b"\0"),
    "missing": Path.unlink,
    "a folder": a_folder_for,
    "a link": a_link_for,
    "a pipe": a_pipe_for,
    "one more": lambda file: (file.parent / "more").touch(),
    "no folder": lambda file: shutil.rmtree(file.parent),
}
FILES = ("tokens", "labels", "lengths", "shown", "shown_ends", "facts.json", "checksum")
BLOCKS: list[EncodedRecords] = [
    [("a", Encoded(np.array([1, 2], np.uint32), np.array([-100, 2], np.int32), b"{}")), ("b", None)],
    [("c", Encoded(np.array([3] * 9, np.uint32), np.array([3] * 9, np.int32), b'{"c": 1}'))],
]


def build_chats(folder: Path) -> None:
    write_store(folder, BLOCKS, np.uint16, labelled=True, separator=None)


def contents(opened: Store) -> list[object]:
    assert opened.labels is not None
    assert opened.shown is not None
    assert opened.shown_ends is not None
    arrays = (opened.tokens, opened.labels, opened.lengths, opened.shown, opened.shown_ends)
    return [*((array.dtype, array.tolist()) for array in arrays), opened.facts]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_damaged_is_made_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], file: str, damage: str
) -> None:
    """0.5.0: flipped bits were trained, and other damage ended with a traceback: a cache was believed."""
    cache = Cache(tmp_path)
    whole = cache.entry("key", build_chats, lambda folder: (folder, contents(open_store(folder))))
    assert capfd.readouterr().err == ""
    DAMAGES[damage](whole[0] / file)
    again = cache.entry("key", build_chats, lambda folder: (folder, contents(open_store(folder))))
    assert again == whole
    said = f"penstock: {whole[0]} is not as it was written, and is made again\n"
    assert capfd.readouterr().err == ("" if damage == "no folder" else said)

    def built_again(_: Path) -> NoReturn:
        raise AssertionError

    assert cache.entry("key", built_again, lambda folder: contents(open_store(folder))) == whole[1]


def test_an_entry_is_known_by_its_key(tmp_path: Path) -> None:
    """0.5.0: a folder under another's name gave that one's tokens."""
    cache = Cache(tmp_path)

    def build(text: str) -> Callable[[Path], None]:
        def write(folder: Path) -> None:
            (folder / "made").write_text(text)

        return write

    one, other = (cache.entry(text, build(text), lambda folder: folder) for text in ("one", "two"))
    one.rename(tmp_path / "moved")
    other.rename(one)
    (tmp_path / "moved").rename(other)
    assert [cache.entry(text, build(text), made) for text in ("one", "two")] == ["one", "two"]


# _LARGE, _BLOCK: small entries are large; _checksum is counted
def test_a_large_entry_is_hashed_again_where_it_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_LARGE", 10)
    monkeypatch.setattr(store, "_BLOCK", 4)
    cache, hashed = Cache(tmp_path), list[str]()
    checksum = store._checksum

    def counted(folder: Path, key: str) -> str:
        hashed.extend([key] if key else [])  # without one it is for the facts
        return checksum(folder, key)

    monkeypatch.setattr(store, "_checksum", counted)

    def opened() -> Path:
        hashed.clear()
        return cache.entry("key", build_chats, lambda folder: folder)

    folder = opened()
    opened()
    assert len(hashed) == 1  # a further change may not show in the times yet
    monkeypatch.setattr(store, "_SETTLED", 0.0)
    opened()
    assert len(hashed) == 1
    opened()
    assert hashed == []
    before = (folder / "tokens").stat()
    flip(folder / "tokens")
    os.utime(folder / "tokens", ns=(before.st_atime_ns, before.st_mtime_ns))
    opened()
    assert len(hashed) == 2  # what is there, and what is made again
    opened()
    assert len(hashed) == 1
    monkeypatch.setattr(store, "boot_id", lambda: "another machine")
    opened()
    assert len(hashed) == 1


def test_a_cache_that_is_only_read_is_used_where_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache(tmp_path)
    folder = cache.entry("key", build_chats, lambda folder: folder)
    (tmp_path / f"{folder.name}.lock").unlink()
    opened = Path.open

    def read_only(path: Path, mode: str = "r", *more: Any, **options: Any) -> Any:
        if mode.strip("b") != "r":
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return opened(path, mode, *more, **options)

    monkeypatch.setattr(Path, "open", read_only)
    monkeypatch.setattr(Path, "mkdir", lambda path: read_only(path, "w"))
    assert cache.entry("key", build_chats, lambda folder: folder) == folder
    with refuses(ConfigError, "data.cache=", "Read-only file system"):
        cache.entry("other", build_chats, open_store)


# _Loader._tokenise: the file changes just before it is read
def test_a_source_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.5.0: the new text's tokens were kept for the old text, for ever."""
    file = tmp_path / "a.txt"
    file.write_bytes(bytes(range(100)))
    tokenise = loading._Loader._tokenise

    def appended(*arguments: Any) -> None:
        tokenise(*arguments)
        file.write_bytes(bytes(range(101)))

    monkeypatch.setattr(loading._Loader, "_tokenise", appended)
    with refuses(DataError, rule="changed while"):
        batches(tmp_path, path=str(file))
    monkeypatch.undo()
    file.write_bytes(bytes(range(100)))
    assert batches(tmp_path, path=str(file))


# ---- A fuzzer of whole caches


def batches(folder: Path, **data: Any) -> list[bytes]:
    """The first batches and those held out, with the digest that a resume compares."""
    section = {
        "tokenizer": "bytes",
        "sequence_length": 8,
        "cache": str(folder / "cache"),
        "held_out": 0.2,
        **data,
    }
    config = TrainConfig.model_validate({
        "model": {"config": {"model_type": "qwen3"}}, "data": section,
        "train": {"batch_size": 2}, "pipeline": {"microbatches": 2},
    })  # fmt: skip
    loaded = loading.load_data(config, ByteTokenizer(), 512)
    several = [*(loaded.batch(step) for step in range(1, 4)), *loaded.held_out_batches(2)]
    parts = [part for batch in several
             for part in (batch.content if isinstance(batch.content, list) else [batch.content])]  # fmt: skip
    found = [pickle.dumps({name: value.tolist() for name, value in part.items()}) for part in parts]
    return [*found, loaded.digest.encode()]


def sources(folder: Path) -> list[dict[str, Any]]:
    (folder / "text").write_bytes(bytes(range(1, 101)))
    rows = [{"input_ids": [1 + n, 2, 3 + n, 4], "labels": [-100, 2, 3 + n, 4]} for n in range(20)]
    (folder / "tokens.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    megatron = write(folder, [[list(range(1, 90))], [list(range(9, 30))]])
    return [
        {"path": str(folder / "text")},
        {"path": str(folder / "tokens.jsonl"), "kind": "tokens", "packing": "best_fit"},
        {"path": f"{megatron}.bin"},
    ]


def damage_a_cache(choices: random.Random, cache: Path) -> None:
    """One damage to one of its files or folders."""
    files = sorted(path for path in cache.rglob("*") if path.is_file())
    folders = sorted(path for path in cache.iterdir() if path.is_dir())
    file, folder = choices.choice(files), choices.choice(folders)
    match choices.randrange(10):
        case 0 | 1 | 2:
            file.write_bytes(mutated_bytes(choices, file.read_bytes()))
        case 3:
            facts = choices.choice([path for path in files if path.name == "facts.json"])
            facts.write_text(json.dumps(mutated_json(choices, json.loads(facts.read_text()))))
        case 4:
            choices.choice((Path.unlink, a_folder_for, a_pipe_for))(file)
        case 5:
            shutil.rmtree(folder)
        case 6:
            shutil.rmtree(folder)
            folder.write_bytes(choices.randbytes(9))
        case 7:
            other = choices.choice(files)
            other.write_bytes(file.read_bytes())
        case 8:
            other = choices.choice([path for path in folders if path != folder])
            shutil.rmtree(other)
            shutil.copytree(folder, other)
        case _:
            file.unlink()
            file.symlink_to(choices.choice([path for path in files if path != file]))


# a case takes 15 ms: fewer than CASES has in the default run
FUZZED = [
    pytest.param(range(40), id="first"),
    pytest.param(range(40, 2000), id="more", marks=[pytest.mark.sweep, pytest.mark.timeout(3000)]),
]


@pytest.mark.parametrize("cases", FUZZED)
def test_a_damaged_cache_gives_the_batches_of_a_fresh_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cases: range
) -> None:
    """0.5.0: ten of twelve damages ended with a traceback, and the other two trained."""
    monkeypatch.setattr(store, "_SETTLED", 0.0)  # so that contents are known by their stamps
    kinds = sources(tmp_path)
    expected = [batches(tmp_path, **data) for data in kinds]
    shutil.copytree(tmp_path / "cache", tmp_path / "whole")
    for number in cases:
        with seeded(number) as choices:
            damage_a_cache(choices, tmp_path / "cache")
            kind = choices.randrange(len(kinds))
            if all(path.is_file() for path in (tmp_path / "cache").glob("*.lock")):
                assert batches(tmp_path, **kinds[kind]) == expected[kind]
            else:  # a folder or a pipe stands in the place of one
                with suppress(PenstockError):
                    assert batches(tmp_path, **kinds[kind]) == expected[kind]
            shutil.rmtree(tmp_path / "cache")
            shutil.copytree(tmp_path / "whole", tmp_path / "cache")


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
    opened = open_store(tmp_path / "made")
    assert opened.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 300, 9, 10]
    assert opened.tokens.dtype == dtype
    assert opened.lengths.tolist() == [4, 2, 4]
    assert (opened.facts.highest, opened.facts.at) == (300, f"{prefix}.bin document 2")
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
    with refuses(DataError, rule="it counts 20 bytes, and data_text_document.bin has 2"):
        read_index(Path(f"{prefix}.idx"), Path(f"{prefix}.bin"))
    Path(f"{prefix}.bin").unlink()
    with refuses(DataError, rule="cannot be read"):
        read_index(Path(f"{prefix}.idx"), Path(f"{prefix}.bin"))


def test_negative_tokens_are_refused(tmp_path: Path) -> None:
    source = open_source(SourceSection(path=f"{write(tmp_path, [[[1, -2]]], np.int32, 4)}.bin"))
    with refuses(DataError, rule="token ids are 0 or more, and it holds -2"):
        write_megatron(tmp_path, source)
