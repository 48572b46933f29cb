"""The documents of a text file, a folder of text, a JSONL file or a Hugging Face dataset on disk."""

from __future__ import annotations

import json
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from penstock.errors import DataError
from penstock.train.config.sections import DataSection

Document = tuple[str, bytes]  # a name for errors, and the text


def documents(section: DataSection) -> Iterator[Document]:
    """Every document, in a fixed order. Raises DataError for what is missing, unreadable or empty."""
    path = Path(section.path).expanduser()
    if not path.exists():
        raise DataError(f"data.path={section.path}", "there is no such file or folder", "Give a local path")
    kind = _kind(path) if section.kind == "auto" else section.kind
    if kind == "dataset":
        return _dataset(path, section.text_field)
    if kind == "jsonl":
        return _jsonl(path, section.text_field)
    return _folder(path, section) if path.is_dir() else iter([(str(path), _read(path))])


def _kind(path: Path) -> str:
    if path.is_dir():
        return "dataset" if any((path / n).is_file() for n in ("state.json", "dataset_dict.json")) else "text"
    return "jsonl" if path.suffix in (".jsonl", ".ndjson") else "text"


def _folder(path: Path, section: DataSection) -> Iterator[Document]:
    """Files below `path`, sorted by the parts of their paths, so that every machine has the same order."""
    excluded = set(section.exclude)
    names = (file.relative_to(path) for file in path.rglob("*"))
    chosen = sorted(
        (name for name in names
         if any(fnmatch(name.name, pattern) for pattern in section.include)
         and not excluded.intersection(name.parts) and (path / name).is_file()),
        key=lambda name: name.parts,
    )  # fmt: skip
    if not chosen:
        raise DataError(
            f"data.path={section.path}",
            f"no file below it matches data.include={list(section.include)} and none of data.exclude",
            "Fix the patterns, or give another folder",
        )
    return ((str(path / name), _read(path / name)) for name in chosen)


def _jsonl(path: Path, field: str) -> Iterator[Document]:
    if path.is_dir():
        raise DataError(
            f"data.path={path}", "data.kind=jsonl reads one file and this is a folder", "Name the file"
        )
    good = 0  # lines: what the others have is no fault of data.text_field
    for number, line in enumerate(_read(path).split(b"\n"), start=1):
        if line.strip():
            yield f"{path} line {number}", _of_line(path, number, line, field, good)
            good += 1


def _of_line(path: Path, number: int, line: bytes, field: str, good: int) -> bytes:
    name, remedy = f"{path} line {number}", f"Mend line {number} of {path}, or remove it"
    try:
        row = json.loads(line)
        if not isinstance(row, dict):
            rule = f"each line is a JSON object, and this is a {type(row).__name__}"
            raise DataError(f"data file {name}", rule, f'{remedy}: {{"{field}": "..."}}')
        return _encoded(name, row, field, remedy if good else "")
    except ValueError as error:  # json's own, and Unicode's
        raise DataError(f"data file {name}", f"it is not JSON: {error}", remedy) from None


def _dataset(path: Path, field: str) -> Iterator[Document]:
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"data.path={path}",
            "a Hugging Face dataset needs the package datasets, which is not installed",
            "Install it: pip install 'penstock[datasets]'",
        ) from error
    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as error:  # a damaged folder raises whatever its first reader does
        rule = f"datasets cannot load it ({type(error).__name__}: {error})"
        raise DataError(f"data.path={path}", rule, "Give a folder that save_to_disk wrote") from error
    if isinstance(loaded, datasets.DatasetDict):
        raise DataError(
            f"data.path={path}",
            f"it holds several splits ({', '.join(loaded)}) and training takes one",
            f"Give one of them, e.g. {path / next(iter(loaded), '')}",
        )
    if field not in loaded.column_names:
        raise _missing(str(path), field, loaded.column_names)
    for number, text in enumerate(loaded[field]):
        yield f"{path} row {number}", _encoded(f"{path} row {number}", {field: text}, field)


def _encoded(name: str, row: dict[str, object], field: str, remedy: str = "") -> bytes:
    """remedy: "" where all rows may be like this one"""
    if field not in row:
        raise _missing(name, field, list(row), remedy)
    text = row[field]
    if not isinstance(text, str):
        rule = f"{field} holds a {type(text).__name__} and no text"
        raise DataError(f"data file {name}", rule, remedy or "Set data.text_field")
    return text.encode("utf-8")


def _missing(name: str, field: str, known: list[str], remedy: str = "") -> DataError:
    return DataError(
        f"data file {name}",
        f"it has no field {field!r}, only {', '.join(map(repr, known)) or 'none'}",
        remedy or "Set data.text_field to the one that holds the text",
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        rule = f"it cannot be read ({error.strerror})"
        raise DataError(f"data file {path}", rule, "Fix its permissions, or exclude it") from None
