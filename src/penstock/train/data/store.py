"""Tokens on disk, mapped into memory: made once, by one process, and shared by all.

    <cache>/<key>/tokens        of all documents, end to end
                  labels        of each token; not there where all count
                  lengths       of each document, in tokens
                  shown         of chats that show images: the chats once more, end to end, in JSON
                  shown_ends    where each of these ends, in bytes
                  row_labels    of whole documents: the numbers of each one's label, end to end
                  facts.json    counts and digests
                  checksum      of all of these
    <cache>/<key>.lock          locked by the process that checks, builds or opens
            <key>.checked       stamps of the files when a machine last hashed them

The key is a digest of everything that determines the tokens. A folder is complete or absent: it is written
under another name and renamed. The lock ends with its process, so that a build that was killed neither blocks
the next one nor looks complete. Nothing in a folder is trusted: its bytes are hashed before it is opened, and
a folder that is damaged is made again. So the readers here need not check the files.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import mmap
import os
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from struct import Struct
from typing import Any, BinaryIO, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from penstock.batch.loss import IGNORED
from penstock.errors import ConfigError, DataError
from penstock.reading import read_bytes, read_json
from penstock.runtime.health.notes import boot_id
from penstock.train.data.packing import Numbers
from penstock.train.data.sources import DataSource, digest_of, stat_of, wrong
from penstock.train.encoding.chat import Encoded, Labels
from penstock.train.encoding.encode import EncodedRecords
from penstock.train.encoding.tokenizer import Ids

T = TypeVar("T")

FORMAT = 3  # of the files below; it is a part of the key
_SETTLED = 2.0  # seconds after which a further change of a file changes its time stamp
_CHECKSUM = "checksum"
_BLOCK = 4 << 20  # bytes that a thread hashes at once, or tokens that are read at once
_LARGE = 64 << 20  # bytes of an entry, up to which hashing takes no noticeable time
_SMALL = 1 << 16  # bytes of a file that is read whole, and not mapped


class StoreFacts(NamedTuple):
    """Facts about a store's tokens.

    documents, tokens: their numbers
    counted: the number of tokens with a label
    dropped: the number of records that were left out
    highest, at: the highest id or label, and the first record that has it
    digest: of the files of tokens, labels and lengths
    """

    documents: int
    tokens: int
    counted: int
    dropped: int
    highest: int
    at: str
    digest: str


@dataclass(frozen=True)
class Store:
    """Documents end to end.

    Attributes:
        tokens, labels: the id and the label of each token; labels None if all count
        lengths: the number of tokens of each document
        shown, shown_ends: the chats in JSON, from which images are read, end to end, and where each ends;
            None if no document shows images
        row_labels: the label of each document (documents, numbers of a label); None if they have none
    """

    tokens: Ids
    labels: Labels | None
    lengths: Numbers
    facts: StoreFacts
    shown: npt.NDArray[np.uint8] | None = None
    shown_ends: Numbers | None = None
    row_labels: npt.NDArray[np.float64] | None = None

    def read(self, start: int, count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """ids and labels of `count` tokens, copied."""
        ids = self.tokens[start : start + count].astype(np.int64)
        return ids, ids if self.labels is None else self.labels[start : start + count].astype(np.int64)

    def shown_at(self, start: int) -> bytes | None:
        """The chat in JSON of the document that begins at this token, from which its images are read."""
        if self.shown is None or self.shown_ends is None:
            return None
        document = self._document(start)
        begin = int(self.shown_ends[document - 1]) if document else 0
        return self.shown[begin : int(self.shown_ends[document])].tobytes()

    def row_label_at(self, start: int) -> tuple[float, ...] | None:
        """The label of the document that begins at this token; None if documents have none."""
        return None if self.row_labels is None else tuple(self.row_labels[self._document(start)].tolist())

    def length_at(self, start: int) -> int:
        """The number of tokens of the document that begins at this one."""
        return int(self.lengths[self._document(start)])

    def _document(self, start: int) -> int:
        """The number of the document that has this token."""
        return int(np.searchsorted(self._ends, start, side="right"))

    @cached_property
    def _ends(self) -> Numbers:
        return np.cumsum(self.lengths)


def forget(arrays: Iterable[object]) -> None:
    """Unmap the pages that were read: else they count as memory of the process until it is scarce."""
    for array in arrays:
        if isinstance(array, np.memmap):
            array._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]


# ---- The cache


@dataclass(frozen=True)
class Cache:
    """A folder of entries, each a folder of files that is made once and checked when it is opened."""

    folder: Path

    @classmethod
    def at(cls, folder: str | None) -> Cache:
        """data.cache, $PENSTOCK_CACHE or ~/.cache/penstock. Raises ConfigError if it cannot be made."""
        path = Path(folder or os.environ.get("PENSTOCK_CACHE") or "~/.cache/penstock")
        try:
            path = path.expanduser()
            path.mkdir(parents=True, exist_ok=True)
        except (OSError, RuntimeError) as error:  # RuntimeError: there is no such user
            raise _unwritable(path, error) from None
        return cls(path)

    def entry(self, parts: object, build: Callable[[Path], None], opened: Callable[[Path], T]) -> T:
        """The result of `opened` for the folder of the key `parts`, which `build` writes if there is none.

        One process builds, the others wait for it. An entry whose bytes are not those that were written is
        built again. Raises ConfigError if it must be built and cannot be written.
        """
        key = digest_of(repr((FORMAT, parts)))
        made = self.folder / key
        with self._lock(key):
            if not _is_whole(made):
                self._build(made, build)
            try:
                return opened(made)
            except (OSError, ValueError) as error:
                rule = f"it changed while it was opened ({error})"
                raise DataError(f"data.cache, {made}", rule, "Start again: it is then made anew") from error

    def _build(self, made: Path, build: Callable[[Path], None]) -> None:
        building = made.with_name(f"{made.name}.building-{os.getpid()}")
        try:
            for left in (made, *self.folder.glob(f"{made.name}.building-*")):  # damaged, or of a killed build
                if left.is_dir() and not left.is_symlink():
                    shutil.rmtree(left)
                else:
                    left.unlink(missing_ok=True)
            building.mkdir()
            build(building)
            (building / _CHECKSUM).write_text(_checksum(building, made.name))
            building.rename(made)
        except OSError as error:
            raise _unwritable(self.folder, error) from error
        finally:
            shutil.rmtree(building, ignore_errors=True)

    @contextmanager
    def _lock(self, key: str) -> Iterator[None]:
        try:
            file = (self.folder / f"{key}.lock").open("a+")
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise _unwritable(self.folder, error) from None
            yield  # a read-only cache needs no lock
            return
        with file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield  # the file stays: if removed, waiting and new processes would lock two different files

    def digest(self, source: DataSource) -> str:
        """The digest of a source's contents; files whose names and stamps are known are not read again."""
        if source.format == "dummy":
            return source.digest()
        stamps = [(str(file.absolute()), *_stamp(stat_of(file))) for file in source.contents()]
        if not _settled(stamps):
            return source.digest()

        def build(folder: Path) -> None:
            (folder / "digest").write_text(source.digest())

        return self.entry(("contents", stamps), build, lambda folder: (folder / "digest").read_text())


def _is_whole(made: Path) -> bool:
    """Whether an entry has exactly the bytes that were written; prints a line if it has others.

    A large entry is hashed once on each machine, until it is changed or the machine starts again.
    """
    if not os.path.lexists(made):
        return False
    checked, known = made.with_name(f"{made.name}.checked"), ""
    try:
        stamps = [(file.name, *_stamp(file.lstat())) for file in sorted(made.iterdir())]
        if sum(size for _, size, *_ in stamps) > _LARGE and _settled(stamps):
            known = repr((boot_id(), stamps))
            if checked.is_file() and checked.read_bytes() == known.encode():
                return True
        whole = read_bytes(made / _CHECKSUM) == _checksum(made, made.name).encode()
    except OSError:
        whole = False
    if not whole:
        print(f"penstock: {made} is not as it was written, and is made again", file=sys.stderr, flush=True)
    elif known:
        with suppress(OSError):  # of a read-only cache
            checked.write_text(known)
    return whole


def _checksum(folder: Path, key: str) -> str:
    """The hash of the names, sizes and bytes of an entry's files, on all cores. Raises OSError."""
    files = [(file, file.lstat()) for file in sorted(folder.iterdir())]
    if not all(stat.S_ISREG(state.st_mode) for _, state in files):
        return "not of files alone"
    files = [(file, state) for file, state in files if file.name != _CHECKSUM]
    whole = hashlib.sha256(repr((key, [(file.name, state.st_size) for file, state in files])).encode())
    blocks = ((file, at) for file, state in files for at in range(0, state.st_size, _BLOCK))
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for of_block in threads.map(_block_digest, blocks):
            whole.update(of_block)
    return whole.hexdigest()


def _block_digest(block: tuple[Path, int]) -> bytes:
    file, at = block
    with file.open("rb") as opened:
        opened.seek(at)
        return hashlib.sha256(opened.read(_BLOCK)).digest()


def _stamp(state: os.stat_result) -> tuple[int, int, int, int]:
    """Size, inode, and times of change. No program can set the last one, so that an edit always shows."""
    return state.st_size, state.st_ino, state.st_mtime_ns, state.st_ctime_ns


def _settled(stamps: Sequence[tuple[str, int, int, int, int]]) -> bool:
    """Whether a further change would show in the times."""
    newest = max((max(stamp[3:]) for stamp in stamps), default=0)
    return time.time() - newest / 1e9 >= _SETTLED


def _unwritable(folder: Path, error: Exception) -> ConfigError:
    rule = f"tokens are kept there, and nothing can be written ({error})"
    return ConfigError(
        f"data.cache={folder}", rule, "Give a folder of yours with free space: data.cache=FOLDER"
    )


# ---- Writing and opening


class _Documents:
    """Writes documents end to end, with a separator between two, and collects the facts of them."""

    def __init__(
        self, tokens: BinaryIO, labels: BinaryIO | None, dtype: npt.DTypeLike, separator: int | None
    ) -> None:
        self._tokens, self._labels, self._dtype, self._separator = tokens, labels, dtype, separator
        self.lengths: list[int] = []
        self.shown: list[bytes] = []
        self.row_labels: list[tuple[float, ...]] = []
        self.counted, self.highest, self.at, self.all_count = 0, -1, "", True

    def add(self, name: str, document: Encoded) -> None:
        if self._separator is not None and self.lengths:
            self._tokens.write(np.array([self._separator], dtype=self._dtype).data)
            self.lengths[-1] += 1
            self.highest = max(self.highest, self._separator)  # it ends the first record, which `at` names
        self._tokens.write(document.ids.astype(self._dtype).data)
        self.lengths.append(len(document.ids))
        self.shown += [] if document.shown is None else [document.shown]
        self.row_labels += [] if document.row_label is None else [document.row_label]
        most = document.ids.max(initial=0)
        if self._labels is not None:
            assert document.labels is not None
            self._labels.write(document.labels.data)
            self.counted += int((document.labels != IGNORED).sum())
            self.all_count = self.all_count and np.array_equal(document.ids, document.labels)
            most = max(most, document.labels.max(initial=0))
        if most > self.highest:
            self.highest, self.at = int(most), name


def write_store(
    folder: Path,
    blocks: Iterable[EncodedRecords],
    dtype: npt.DTypeLike,
    labelled: bool,
    separator: int | None,
) -> None:
    """Write the documents of all blocks, with `separator` between two documents.

    Args:
        dtype: of tokens, large enough
        labelled: whether some tokens may not count
    """
    dropped, labels = 0, folder / "labels"
    with (folder / "tokens").open("wb") as tokens, labels.open("wb") as of_tokens:
        documents = _Documents(tokens, of_tokens if labelled else None, dtype, separator)
        for name, document in chain.from_iterable(blocks):
            if document is None:
                dropped += 1
            else:
                documents.add(name, document)
    lengths = np.array(documents.lengths, dtype=np.int64)
    lengths.tofile(folder / "lengths")
    total = int(lengths.sum())
    if not labelled or (documents.all_count and total):
        labels.unlink()
    if documents.shown:
        (folder / "shown").write_bytes(b"".join(documents.shown))
        np.cumsum(list(map(len, documents.shown)), dtype=np.int64).tofile(folder / "shown_ends")
    if documents.row_labels:
        np.array(documents.row_labels, dtype=np.float64).tofile(folder / "row_labels")
    whole = _checksum(folder, "")  # of the files written so far
    counted = documents.counted if labelled else total
    highest = max(documents.highest, 0)
    facts = StoreFacts(len(lengths), total, counted, dropped, highest, documents.at, whole)
    _write_facts(folder, facts, dtype, "tokens")


def _write_facts(folder: Path, facts: StoreFacts, dtype: npt.DTypeLike, tokens: str) -> None:
    """tokens: their file, below the folder or elsewhere"""
    written = {**facts._asdict(), "dtype": np.dtype(dtype).str, "file": tokens}
    (folder / "facts.json").write_text(json.dumps(written))


def open_store(folder: Path) -> Store:
    """Map the files of a folder that `write_store` or `write_megatron` wrote."""
    written = read_json(folder / "facts.json")
    dtype, tokens = written.pop("dtype"), folder / written.pop("file")
    labels, shown, shown_ends, row_labels = (
        mapped(folder / name, kind) if (folder / name).exists() else None
        for name, kind in (
            ("labels", np.int32), ("shown", np.uint8), ("shown_ends", np.int64), ("row_labels", np.float64),
        )
    )  # fmt: skip
    lengths, facts = mapped(folder / "lengths", np.int64), StoreFacts(**written)
    if row_labels is not None:
        row_labels = row_labels.reshape(len(lengths), -1)
    return Store(mapped(tokens, dtype), labels, lengths, facts, shown, shown_ends, row_labels)


def mapped(file: Path, dtype: npt.DTypeLike) -> Any:
    """The array in a file: mapped into memory, unless it is small."""
    small = file.stat().st_size <= _SMALL
    return np.fromfile(file, dtype) if small else np.memmap(file, dtype, "r")


# ---- Megatron's files: NAME.bin has the tokens, NAME.idx says where sequences and documents end

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = Struct("<9sQBQQ")  # the magic, a version, a dtype's code, and the counts of sequences and of bounds
_DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}


def write_megatron(folder: Path, source: DataSource) -> None:
    """Write lengths and facts of a Megatron dataset, whose tokens stay where they are. Raises DataError."""
    binary, index = source.files
    dtype, lengths = read_index(index, binary)
    lengths.tofile(folder / "lengths")
    tokens, highest, lowest, at_highest = mapped(binary, dtype), -1, 0, 0
    whole = hashlib.blake2b(lengths.tobytes(), digest_size=16)
    for at in range(0, len(tokens), _BLOCK):
        block = tokens[at : at + _BLOCK]  # so that no array of all tokens is made
        whole.update(block.data)
        lowest = min(lowest, int(block.min()))
        if int(block.max()) > highest:
            highest, at_highest = int(block.max()), at + int(block.argmax())
    if lowest < 0:
        raise wrong(str(binary), f"token ids are 0 or more, and it holds {lowest}", "Write it again")
    document = int(np.searchsorted(np.cumsum(lengths), at_highest, side="right"))
    blamed, total = f"{binary} document {document}", len(tokens)
    facts = StoreFacts(len(lengths), total, total, 0, highest, blamed, whole.hexdigest())
    _write_facts(folder, facts, dtype, str(binary.absolute()))


def read_index(index: Path, binary: Path) -> tuple[npt.DTypeLike, Numbers]:
    """The dtype of the tokens, and the length of each document. Raises DataError."""
    corrupt = partial(wrong, str(index), remedy="Write both files again with Megatron's preprocess_data.py")
    _, bytes_of_tokens = (stat_of(file).st_size for file in (index, binary))
    content = index.read_bytes()
    if content[:9] != _MAGIC:
        raise corrupt(f"an index of Megatron begins with {_MAGIC!r}, and it begins with {content[:9]!r}")
    if len(content) < _HEADER.size:
        raise corrupt(f"it ends after {len(content)} bytes, within its header")
    _, version, code, sequences, bounds = _HEADER.unpack_from(content)
    if version != 1 or code not in _DTYPES:
        raise corrupt(
            f"version 1 with a dtype of whole numbers is known, and it is version {version}, dtype {code}"
        )
    needed = _HEADER.size + 12 * sequences + 8 * bounds
    if len(content) < needed:
        raise corrupt(
            f"{sequences} sequences and {bounds} bounds take {needed} bytes, and it has {len(content)}"
        )
    lengths = np.frombuffer(content, "<i4", sequences, _HEADER.size).astype(np.int64)
    pointers = np.frombuffer(content, "<i8", sequences, _HEADER.size + 4 * sequences)
    documents = np.frombuffer(content, "<i8", bounds, _HEADER.size + 12 * sequences)
    size = np.dtype(_DTYPES[code]).itemsize
    ends = np.cumsum(lengths)
    if (lengths < 0).any() or not np.array_equal(pointers, (ends - lengths) * size):
        raise corrupt("its sequences do not lie end to end in the .bin file")
    whole = int(ends[-1]) if sequences else 0
    if bytes_of_tokens != whole * size:
        raise corrupt(f"it counts {whole * size} bytes, and {binary.name} has {bytes_of_tokens}")
    if not bounds or documents[0] != 0 or documents[-1] != sequences or (np.diff(documents) < 0).any():
        raise corrupt(f"documents end at sequences from 0 to {sequences}, in order, and its bounds do not")
    ends = np.concatenate([[0], ends])[documents]
    return _DTYPES[code], np.diff(ends).astype(np.int64)
