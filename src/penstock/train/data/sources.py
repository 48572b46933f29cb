"""Reads the files of a source, in a fixed order, record by record.

A record is the text of a file, a line of JSONL, or a row of a dataset. It is not tokenised here, and a line
of JSONL is not parsed, so that a worker process can do both. Only one record, or one block of rows, is in
memory.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from importlib import import_module
from io import TextIOWrapper
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import numpy as np

from penstock.errors import DataError
from penstock.reading import MIB, check_regular, json_at, open_regular, size
from penstock.train.config.data import KINDS, DummySection, SourceSection
from penstock.train.data.named import arrow_files

Columns = Callable[[list[str]], list[str]]
Format = Literal["text", "jsonl", "parquet", "dataset", "megatron", "dummy"]
TOKENS = ("input_ids", "labels")  # the fields of a record that is tokenised already
_GIVE = "Give a local path; for a data set of the Hub give its split too, such as split: train"
MEND = "Mend it, or remove it"
_JSON = (".jsonl", ".ndjson", ".json")
_OF_SEVERAL_FIELDS = tuple(kind for kind, facts in KINDS.items() if facts.several)
_OF_ROWS = (*_OF_SEVERAL_FIELDS, "dataset", "masked")  # kinds of records that a row of a dataset may hold
_BLOCK = 1000  # rows of a dataset that are read at once
_LONGEST = 64 * MIB  # of a record in JSON
_READ = MIB  # characters of a JSON list that are read at once, or more for a long entry
_BLANKS = " \t\r\n"
# the text before an entry of such a list, or its end, the bracket
_OPENING = re.compile(rf"[{_BLANKS}]*\[[{_BLANKS}]*(\])?")
_BETWEEN = re.compile(rf"[{_BLANKS}]*(?:,[{_BLANKS}]*|(\]))")
_NO_LIST = "a list goes on with a comma, or ends with a bracket and the file"
_LINES = re.compile(r".+\.(jsonl|ndjson)(\.(gz|bz2|xz|zst))?")  # compressed ones too, to refuse them
_PACKED = re.compile(rb"\x1f\x8b\x08|BZh[1-9]1AY&SY|\xfd7zXZ\0|\x28\xb5\x2f\xfd|PK\x03\x04")


class Record(NamedTuple):
    """A name for errors, and the content: the bytes of a text, a line of JSONL, or the fields of a row."""

    name: str
    content: bytes | dict[str, Any]


class RecordError(Exception):
    """A record breaks a rule: the rule and the remedy, without the record's name, which `blaming` adds."""

    def __init__(self, rule: str, remedy: str = MEND) -> None:
        super().__init__(rule, remedy)


@contextmanager
def blaming(value: str) -> Iterator[None]:
    """Turn a RecordError into a DataError with this value, such as the file and the line of the record."""
    try:
        yield
    except RecordError as refusal:
        raise DataError(value, *refusal.args) from None


def wrong(name: str, rule: str, remedy: str = MEND) -> DataError:
    """The error of a record, or of a file."""
    return DataError(f"data file {name}", rule, remedy)


def digest_of(text: str) -> str:
    """The digest of a text, 32 hexadecimal digits."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class DataSource:
    """Files and how they are read.

    Attributes:
        files: in the order of their records; of a dataset, its folder or .arrow files
        format: text holds documents, one a file
    """

    section: SourceSection
    files: tuple[Path, ...]
    format: Format

    def records(self, first: int = 0) -> Iterator[Record]:
        """The records from number `first` on, in a fixed order. Raises DataError."""
        if self.format == "dummy":
            return _made_up(self.section.dummy or DummySection(), first)
        if self.format == "megatron":
            rule = "Megatron's files are tokens that are read in place, with no records in them"
            raise DataError(self.section.named, rule, "Leave data.streaming out")
        readers: dict[Format, Callable[[Path], Iterator[Record]]] = {
            "text": _texts,
            "jsonl": _lines,
            "parquet": partial(_parquet, columns=self._columns),
            "dataset": partial(_dataset, columns=self._columns),
        }
        return islice(chain.from_iterable(map(readers[self.format], self.files)), first, None)

    def _columns(self, known: list[str]) -> list[str]:
        """The columns of `known` to read: one for texts; all for chats and tokens, as none may be lost."""
        text = self.section.text_field
        return [text] if text in known and self.section.kind not in _OF_SEVERAL_FIELDS else known

    def contents(self) -> Iterator[Path]:
        """Every file that is read."""
        for file in self.files:
            yield from sorted(path for path in file.rglob("*") if path.is_file()) if file.is_dir() else [file]

    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.stat().st_size for file in self.contents())

    def digest(self) -> str:
        """The digest of the bytes of all files, in their order; of the section for made-up tokens."""
        if self.format == "dummy":
            return digest_of(repr(self.section.dummy))
        whole = hashlib.blake2b(digest_size=16)
        for file in self.contents():
            with readable(file), open_regular(file) as opened:
                whole.update(hashlib.file_digest(opened, "sha256").digest())
        return whole.hexdigest()


def open_source(section: SourceSection) -> DataSource:
    """Find the files. Raises DataError for missing files, and for a kind that does not fit them."""
    if section.kind == "dummy":
        return DataSource(section, (), "dummy")
    if section.split is not None:
        return _named(section)
    path = Path(section.path).expanduser()
    if section.kind == "megatron" or (section.kind == "auto" and path.suffix in (".bin", ".idx")):
        prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
        return DataSource(
            section, tuple(Path(f"{prefix}{suffix}") for suffix in (".bin", ".idx")), "megatron"
        )
    if not path.exists():
        raise DataError(section.named, "there is no such file or folder", _GIVE)
    of_datasets = (path / name for name in ("state.json", "dataset_dict.json"))
    if section.kind == "dataset" or path.suffix == ".arrow" or any(file.is_file() for file in of_datasets):
        return DataSource(section, (path,), "dataset")
    files = _files_below(path, section) if path.is_dir() else (path,)
    for file in files:
        stat_of(file)
    return DataSource(section, files, _format(section, files))


def _named(section: SourceSection) -> DataSource:
    """The rows of a data set by its name. Raises DataError."""
    value, kinds = f"{section.named} with split={section.split}", ("auto", *_OF_ROWS)
    if section.kind not in kinds:
        rule = f"it has rows, and data.kind={section.kind} reads files"
        raise DataError(value, rule, f"Take one of {', '.join(kinds)}, or leave split out")
    datasets = need("datasets", value, "a data set by name needs the package datasets", "datasets")
    return DataSource(section, arrow_files(section, datasets), "dataset")


def _format(section: SourceSection, files: tuple[Path, ...]) -> Format:
    kind, suffixes = section.kind, {file.suffix for file in files}
    if kind == "text":
        return "text"
    if kind == "parquet" or suffixes == {".parquet"}:
        return "parquet"
    if kind == "jsonl" or suffixes <= {*_JSON}:
        return "jsonl"
    if kind in ("auto", "masked"):
        return "text"
    raise DataError(
        section.named,
        f"data.kind={kind} reads JSON, JSONL, Parquet or a dataset, and here is "
        f"{', '.join(sorted(suffix or 'a file without a suffix' for suffix in suffixes))}",
        "Name such a file, or a folder of one kind of them (data.include chooses)",
    )


def _files_below(path: Path, section: SourceSection) -> tuple[Path, ...]:
    """Files below `path`, sorted by the parts of their paths, so that every machine has the same order."""
    chosen = sorted(
        (file for file in _below(path, section.exclude)
         if any(fnmatch(file.name, pattern) for pattern in section.include)
         and (section.kind != "jsonl" or _LINES.fullmatch(file.name))),
        key=lambda file: file.parts,
    )  # fmt: skip
    if not chosen:
        jsonl = " and ends in .jsonl" if section.kind == "jsonl" else ""
        raise DataError(
            section.named,
            f"no file below it matches data.include={list(section.include)}{jsonl} and none of data.exclude",
            "Fix the patterns, or give another folder",
        )
    return tuple(chosen)


def _below(path: Path, excluded: Sequence[str]) -> Iterator[Path]:
    """The files below `path`. Raises DataError if one would be skipped in silence."""

    def unseen(error: OSError) -> None:
        with readable(Path(error.filename)):
            raise error

    for folder, folders, files in os.walk(path, onerror=unseen):
        folders[:] = (name for name in folders if name not in excluded)
        for link in filter(Path.is_symlink, (Path(folder, name) for name in folders)):
            if not link.resolve().is_relative_to(path.resolve()):  # a link within `path` adds no files
                rule = "it is a link to another folder, which is not followed"
                raise wrong(
                    str(link), rule, "Give that folder as a source of data.mixture, or exclude the link"
                )
        yield from (Path(folder, name) for name in files if name not in excluded)


def _made_up(section: DummySection, first: int) -> Iterator[Record]:
    """The records from number `first` on. A record's number determines its tokens."""
    assert section.tokens is not None
    for index in range(first, section.documents):
        ids = np.full(section.tokens, section.value or 0)
        if section.value is None:
            ids = np.random.default_rng((section.seed, index)).integers(
                section.vocabulary, size=section.tokens
            )
        yield Record(f"dummy record {index}", {TOKENS[0]: ids})


# ---- Reading one file


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Raise DataError for a file that cannot be read."""
    try:
        yield
    except OSError as error:
        rule = f"it cannot be read ({error.strerror or error})"
        raise wrong(str(path), rule, "Give regular files that you may read, or exclude it") from None
    except MemoryError:
        rule = "it is one document, and memory does not hold it"
        raise wrong(str(path), rule, "Write several files, or JSONL") from None


def stat_of(file: Path) -> os.stat_result:
    """Size and times of a regular file. Raises DataError for anything else."""
    with readable(file):
        check_regular(file)
        return file.stat()


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    with readable(path), open_regular(path) as file:
        if _PACKED.match(file.read(16)):
            raise wrong(str(path), "it is compressed, and files are read as they are", "Decompress it")
        file.seek(0)
        yield file


def _texts(path: Path) -> Iterator[Record]:
    with _opened(path) as file:
        content = file.read()
    yield Record(str(path), content)


def _lines(path: Path) -> Iterator[Record]:
    """The lines that are not empty; of a file that is one JSON list, its entries."""
    with _opened(path) as file:
        if file.read(64).lstrip().startswith(b"["):
            yield from _entries(path)
            return
        file.seek(0)
        for line_number, line in enumerate(iter(lambda: file.readline(_LONGEST + 1), b""), start=1):
            if len(line) > _LONGEST:
                rule = f"a record has {size(_LONGEST)} at most, and this line has more"
                raise wrong(f"{path} line {line_number}", rule, "Write an object a line")
            if line.strip():
                yield Record(f"{path} line {line_number}", line)


def _entries(path: Path) -> Iterator[Record]:
    """The entries of one JSON list, parsed one at a time.

    Only a piece of the text is in memory, as large as one entry needs.
    """
    entry_number, text, at = 1, "", 0
    try:
        with readable(path), open_regular(path) as raw, TextIOWrapper(raw, "utf-8", newline="") as file:
            while True:
                try:
                    before = (_OPENING if entry_number == 1 else _BETWEEN).match(text, at)
                    if before is None:
                        raise ValueError(_NO_LIST)
                    if before[1]:
                        break
                    entry, end = json_at(text, before.end())
                except ValueError:  # also for an entry at the end of the piece, which goes on in the file
                    rest = text[at:]
                    if len(rest) > _LONGEST or not (more := file.read(max(_READ, len(rest)))):
                        raise
                    text, at = rest + more, 0
                    continue
                if not isinstance(entry, dict):
                    rule = f"each entry of the list is an object, and this is a {type(entry).__name__}"
                    raise wrong(f"{path} entry {entry_number}", rule)
                yield Record(f"{path} entry {entry_number}", entry)
                entry_number, at = entry_number + 1, end
            after = chain([text[before.end() :]], iter(lambda: file.read(_READ), ""))
            if any(piece.strip(_BLANKS) for piece in after):
                raise ValueError(_NO_LIST)
    except ValueError as error:
        rule = f"it is not JSON: {error}"
        raise wrong(f"{path} entry {entry_number}", rule, "Mend it, or write JSONL") from None


def _parquet(path: Path, columns: Columns) -> Iterator[Record]:
    need("datasets", f"data file {path}", "Parquet needs the package datasets", "datasets")
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            yield from _rows(path, file.iter_batches(_BLOCK, columns=columns(file.schema_arrow.names)))
    except (pyarrow.ArrowException, OSError) as error:
        rule = f"pyarrow cannot read it as Parquet ({error})"
        raise wrong(str(path), rule, "Write it again") from None


def _dataset(path: Path, columns: Columns) -> Iterator[Record]:
    rule = "a Hugging Face dataset needs the package datasets"
    datasets = need("datasets", f"data set {path}", rule, "datasets")
    for file in path.rglob("*") if path.is_dir() else (path,):
        if not file.is_dir():
            stat_of(file)
    try:
        is_file = path.is_file()
        loaded = datasets.Dataset.from_file(str(path)) if is_file else datasets.load_from_disk(str(path))
    except Exception as error:  # a damaged folder may raise any error
        rule = f"datasets cannot load it ({type(error).__name__}: {error})"
        raise DataError(f"data set {path}", rule, "Give a folder that save_to_disk wrote") from error
    if isinstance(loaded, datasets.DatasetDict):
        rule = f"it holds several splits ({', '.join(loaded)}) and training takes one"
        raise DataError(f"data set {path}", rule, f"Give one of them, e.g. {path / next(iter(loaded), '')}")
    rows = loaded.select_columns(columns(loaded.column_names)).with_format("arrow")
    yield from _rows(path, rows.iter(_BLOCK))


def _rows(path: Path, blocks: Iterable[Any]) -> Iterator[Record]:
    """The rows of Arrow's blocks."""
    rows = chain.from_iterable(block.to_pylist() for block in blocks)
    return (Record(f"{path} row {row_number}", row) for row_number, row in enumerate(rows))


def need(module: str, value: str, rule: str, extra: str) -> Any:
    """Import a module that an extra of penstock installs. Raises DataError if it is not installed.

    value, rule: of the error
    """
    try:
        return import_module(module)
    except ImportError as error:
        remedy = f"Install it: pip install 'penstock[{extra}]'"
        raise DataError(value, f"{rule}, which is not installed", remedy) from error
