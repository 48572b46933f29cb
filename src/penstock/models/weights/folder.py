"""Atomic folders: a folder is complete or absent.

    .name.writing-1a2b      1. write all files into a hidden folder, their hashes into a manifest, and flush
    .name.replaced-3c4d     2. rename an older folder out of the way
    name                    3. rename the hidden folder onto its name; remove the older one

A folder is whole if its manifest is exactly as penstock writes it, and lists every file of the folder with
its length. The manifest ends with a digest of itself, so that one changed byte is noticed before any file is
read. It has the digest of each file, which is hashed while it is read.

A crash at any moment leaves the old folder or none, and at worst a hidden folder that nothing reads. A crash
between the two renames leaves the old folder under its hidden name (`displaced`).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from safetensors import SafetensorError

from penstock.errors import AlteredError, CheckpointError
from penstock.reading import check_regular, read_text
from penstock.runtime.device.copies import PIECE, Workers

if TYPE_CHECKING:
    from penstock.runtime.ranks import Ranks


MANIFEST = "manifest.json"
_WEIGHTS = (".safetensors", ".safetensors.index.json")
_REMOVED, _REPLACED, _WRITING = "removed", "replaced", "writing"
_AT_ONCE = 2**20  # bytes: each read takes Python's lock, for which other threads wait

# errors of a failing disk and of damaged contents: JSON that nests too deeply, or has wrong types or values
FAILING_DISK = (OSError, SafetensorError)
UNREADABLE = (
    *FAILING_DISK,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


class ManifestEntry(TypedDict):
    """A file in the manifest: its length and hash; the name of a tensor with NaN or infinity, if any.

    piece: bytes of a piece. `sha256` is then the hash of the pieces' hashes, in order, which several threads
        compute. Without it, as up to 0.5.0 and for files of one piece, `sha256` is the hash of the file.
    """

    size: int
    sha256: str
    piece: NotRequired[int]
    not_finite: NotRequired[str]


Hashed = dict[str, ManifestEntry]  # by the file's name in the folder


def write_folder(target: Path, write: Callable[[Path], Hashed | None], processes: Ranks) -> None:
    """Make `target` hold the files of `write` from all processes, or leave it as it was. Collective.

    Args:
        target: the same on all processes, on a file system that they share. An older checkpoint is replaced.
        write: called with a temporary folder. Each process writes files with its own names; may be
            collective. It returns the entries of files hashed while writing. Other files are read again.

    Raises:
        CheckpointError: `target` is not a checkpoint, or nothing can be written.
        RunError: another process failed otherwise, and raises its own error.
        After any of them the temporary folder is removed.
    """
    target = Path(os.path.abspath(target))
    temporary = target.parent / processes.gather(f".{target.name}.{_WRITING}-{secrets.token_hex(4)}")[0]

    def write_and_flush() -> Hashed:
        entries = write(temporary) or {}
        for name in entries:  # not file by file: the disk writes one while the next is hashed
            _flush(temporary / name)
        return entries

    try:
        processes.attempt("make the folder", lambda: _prepare(temporary, target))
        written = processes.attempt("write its part of the folder", write_and_flush)
        files = _of_all(processes, written)
        rest = [name for name in _names_on_all(temporary, processes) if name not in files]
        mine = rest[processes.index :: processes.count]
        described = processes.attempt(
            "hash its part of the folder", lambda: {name: _describe(temporary / name) for name in mine}
        )
        files |= _of_all(processes, described)
        publish = partial(_publish, temporary, target, files)
        processes.attempt("publish the folder", publish if processes.index == 0 else lambda: None)
    except BaseException:
        if processes.index == 0:  # only process 0 knows that it is not publishing the folder
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def check_lengths(path: Path, *, added: bool = False) -> None:
    """Raise CheckpointError unless `path` holds the files of its manifest at their lengths. Reads none.

    Other files may have hidden names, which nothing reads. For contents see `hashed_meanwhile`.

    Args:
        added: whether the folder may have other files too, as a model's folder, except weights
    """
    files = read_manifest(path)
    for name, entry in files.items():
        file = path / name
        with readable(path, name):
            if not file.is_file():
                raise broken(path, name, "the manifest lists this file and it is missing")
            size = file.stat().st_size
        if size != entry["size"]:
            raise broken(path, name, f"it has {size} bytes and was written with {entry['size']}")
    with readable(path, "its list of files"):
        others = sorted(_files_in(path) - files.keys() - {MANIFEST})
    for name in others:
        hidden = any(part.startswith(".") for part in PurePosixPath(name).parts)
        if not hidden and (not added or name.endswith(_WEIGHTS)):
            rule = "the manifest does not list this file, and it might be read"
            raise CheckpointError(f"checkpoint {path}: {name}", rule, "Move it out of the folder")


def not_finite(path: Path) -> str:
    """The tensor of folder `path` that was written with NaN or infinity, as text; empty without one."""
    bad_tensors = (
        (name, entry["not_finite"]) for name, entry in read_manifest(path).items() if "not_finite" in entry
    )
    return next((f"{tensor} in {name} holds NaN or infinity" for name, tensor in bad_tensors), "")


def check_contents(path: Path, name: str) -> None:
    """Raise AlteredError if the file `name` of the folder `path` has changed since it was written."""
    files = read_manifest(path)
    if name not in files:
        raise broken(path, name, "the manifest does not list this file")
    check_digest(path, name, files[name])


def check_digest(
    path: Path, name: str, entry: ManifestEntry, stopped: Callable[[], bool] = lambda: False
) -> None:
    """Raise AlteredError unless the file `name` has the digest of its entry, or `stopped` returns True."""
    with readable(path, name):
        digest = sha256_of(path / name, entry.get("piece"), stopped)
    if not stopped() and digest != entry["sha256"]:
        raise broken(path, name, "its contents differ from what was written (sha256)", AlteredError)


def remove_folder(path: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that a crash leaves none that looks complete.

    Raises CheckpointError if it has any file that is no part of a checkpoint.
    """
    check_replaceable(path)
    removed = path.parent / f".{path.name}.{_REMOVED}-{secrets.token_hex(4)}"
    path.rename(removed)
    _flush(path.parent)
    shutil.rmtree(removed)


def looks_whole(path: Path) -> bool:
    """Whether `check_lengths` passes."""
    try:
        check_lengths(path)
    except CheckpointError:
        return False
    return True


# for the hidden folders below, `name` is a pattern of their names before they were hidden


def leftovers(folder: Path, name: str = "*") -> list[Path]:
    """Hidden folders of removals that were cut short, and of replacements whose new folder is complete."""
    replaced = (path for path in folder.glob(f".{name}.{_REPLACED}-*") if looks_whole(target_of(path)))
    return sorted([*folder.glob(f".{name}.{_REMOVED}-*"), *replaced])


def displaced(folder: Path, name: str = "*") -> list[Path]:
    """Hidden older folders of replacements that were killed before the new folder was complete."""
    return sorted(p for p in folder.glob(f".{name}.{_REPLACED}-*") if not looks_whole(target_of(p)))


def target_of(hidden: Path) -> Path:
    """The former or future path of a hidden folder."""
    return hidden.with_name(hidden.name.removeprefix(".").rpartition(".")[0])


def unfinished(folder: Path, name: str = "*") -> list[Path]:
    """Hidden folders of writes that are under way or were cut short."""
    return sorted(folder.glob(f".{name}.{_WRITING}-*"))


def _prepare(temporary: Path, target: Path) -> None:
    if os.path.lexists(target):
        check_replaceable(target)
    try:
        temporary.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"folder {target}", f"it cannot be written ({error.strerror})", "Name a folder that you may write"
        ) from error


def check_replaceable(target: Path) -> None:
    """Raise CheckpointError unless `target` is a checkpoint: a mistyped path must not delete files."""
    present = _files_in(target) if target.is_dir() else {target.name}
    listed = {MANIFEST, *read_manifest(target)} if MANIFEST in present else set()
    if foreign := sorted(present - listed):
        raise CheckpointError(
            f"folder {target}",
            f"it has {foreign[0]}, which is no part of a checkpoint and would be lost",
            "Name another folder, or move that folder away first",
        )


def _files_in(folder: Path) -> set[str]:
    return {file.relative_to(folder).as_posix() for file in folder.rglob("*") if not file.is_dir()}


def _of_all(processes: Ranks, files: Hashed) -> Hashed:
    """The entries of every process. Collective."""
    return {name: entry for theirs in processes.gather(files) for name, entry in theirs.items()}


def _names_on_all(folder: Path, processes: Ranks) -> list[str]:
    names = sorted(_files_in(folder))
    for index, others in enumerate(processes.gather(names)):
        if others != names:
            raise CheckpointError(
                f"folder {folder.parent}",
                f"processes {processes.index} and {index} do not see the same files in it",
                "Name a folder on a file system that all processes share",
            )
    return names


def _describe(file: Path) -> ManifestEntry:
    """Flush a file, and read it to make its entry."""
    _flush(file)
    size = file.stat().st_size
    piece = piece_of(size)
    return made_entry(size, sha256_of(file, piece), piece)


def _publish(temporary: Path, target: Path, files: Mapping[str, ManifestEntry]) -> None:
    manifest = temporary / MANIFEST
    manifest.write_text(_manifest(files), encoding="utf-8")
    _flush(manifest)
    for folder in (temporary, *(entry for entry in temporary.rglob("*") if entry.is_dir())):
        _flush(folder)
    aside = target.parent / f".{target.name}.{_REPLACED}-{secrets.token_hex(4)}"
    try:
        if os.path.lexists(target):  # a rename cannot replace a folder with files
            target.rename(aside)
        temporary.rename(target)
    except BaseException:  # Ctrl-C too
        if os.path.lexists(aside) and not os.path.lexists(target):
            aside.rename(target)
        raise
    _flush(target.parent)
    if os.path.lexists(aside) and looks_whole(target):  # else the older one still counts
        remove_hidden(aside)


def remove_hidden(path: Path) -> None:
    """Remove a hidden folder, or a link in its place."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _manifest(files: Mapping[str, ManifestEntry]) -> str:
    """The only text of a manifest that lists `files`."""
    listed: dict[str, Any] = {"files": dict(sorted(files.items()))}
    digest = hashlib.sha256(json.dumps(listed, indent=1).encode()).hexdigest()
    return json.dumps({**listed, "digest": digest}, indent=1) + "\n"


def read_manifest(path: Path) -> Hashed:
    """The manifest of `path`. Raises CheckpointError if it is missing, unreadable or changed.

    Versions up to 0.5.0 wrote manifests without a digest of themselves.
    """
    file = path / MANIFEST
    with readable(path, MANIFEST):
        if not path.is_dir():
            raise CheckpointError(
                f"checkpoint {path}",
                "there is no such folder",
                "Give the path of a checkpoint that was written",
            )
        if not file.is_file():
            raise broken(path, MANIFEST, "a complete checkpoint has a manifest and this folder has none")
        text = read_text(file)
    try:
        manifest = json.loads(text, object_pairs_hook=_each_once)
        files = {name: _entry(name, **entry) for name, entry in manifest["files"].items()}
        if not files:
            raise ValueError("it lists no file")
        if manifest.keys() != {"files"} and text != _manifest(files):
            raise ValueError("its digest is another")
    except UNREADABLE as error:
        raise broken(path, MANIFEST, f"the manifest itself is damaged ({error})") from error
    return files


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Raises ValueError for a key that occurs twice, of which Python would take the last."""
    if len(made := dict(pairs)) < len(pairs):
        raise ValueError("a key occurs twice")
    return made


_MOST_PIECES = 1 << 20  # of a file; 16 TiB in pieces of the present size


def _entry(
    name: str, *, size: int, sha256: str, piece: int | None = None, not_finite: str = ""
) -> ManifestEntry:
    """An entry as read. Raises ValueError for a name outside of the folder, and for values out of range."""
    inside = PurePosixPath(name)
    if name in ("", ".", MANIFEST) or inside.is_absolute() or ".." in inside.parts or str(inside) != name:
        raise ValueError(f"{name!r} is no file of the folder")
    if type(size) is not int or size < 0 or not re.fullmatch("[0-9a-f]{64}", sha256):
        raise ValueError(f"{name!r} has size={size!r}, sha256={sha256!r}")
    if piece is not None and not (type(piece) is int and 0 < piece < size <= piece * _MOST_PIECES):
        raise ValueError(f"{name!r} has size={size!r}, piece={piece!r}")
    return made_entry(size, sha256, piece, not_finite)


def made_entry(size: int, sha256: str, piece: int | None = None, not_finite: str = "") -> ManifestEntry:
    """An entry with its keys in the order of a manifest. not_finite: empty for none"""
    made: ManifestEntry = {"size": size, "sha256": sha256}
    if piece is not None:
        made["piece"] = piece
    return {**made, "not_finite": str(not_finite)} if not_finite else made


def piece_of(size: int) -> int | None:
    """The bytes of a piece of a new file; None for a file of one piece."""
    return PIECE if size > PIECE else None


@contextmanager
def readable(path: Path, name: str, kinds: tuple[type[Exception], ...] = UNREADABLE) -> Iterator[None]:
    """Raise CheckpointError if the block raises one of `kinds` while it reads `name` of the folder `path`.

    A resume then takes the previous checkpoint.
    """
    try:
        yield
    except kinds as error:
        why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise broken(path, name, f"it cannot be read ({why})") from error


def broken(
    path: Path, name: str, rule: str, kind: type[CheckpointError] = CheckpointError
) -> CheckpointError:
    return kind(f"checkpoint {path}: {name}", rule, "Take another checkpoint, or copy it again")


def sha256_of(file: Path, piece: int | None = None, stopped: Callable[[], bool] = lambda: False) -> str:
    """The hash of a file, or that of the hashes of its pieces. The result has no meaning once `stopped`."""
    check_regular(file)
    with file.open("rb", buffering=0) as opened:
        size = os.fstat(opened.fileno()).st_size
        if piece is None or piece >= size:
            return str(_hash(opened.fileno(), 0, size, stopped).hexdigest())
        hashes = [b""] * -(-size // piece)

        def work(index: int) -> None:
            hashes[index] = _hash(opened.fileno(), index * piece, piece, stopped).digest()

        with Workers() as workers:
            for index in range(len(hashes)):
                workers.do(partial(work, index))
    return hashlib.sha256(b"".join(hashes)).hexdigest()


def _hash(file: int, start: int, count: int, stopped: Callable[[], bool]) -> Any:
    """The hash of up to `count` bytes of an open file."""
    digest, buffer, end = hashlib.sha256(), memoryview(bytearray(min(count, _AT_ONCE))), start + count
    while not stopped() and (read := os.preadv(file, [buffer[: end - start]], start)):
        digest.update(buffer[:read])
        start += read
    return digest


def _flush(path: Path) -> None:
    """Write a file, or a folder's list of names, to the disk, so that it survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
