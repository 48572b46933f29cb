"""Atomic folders: a folder is complete or absent.

    .name.writing-1a2b      1. write all files into a hidden folder, hash them into a manifest, flush the disk
    .name.replaced-3c4d     2. rename an older folder out of the way
    name                    3. rename the hidden folder onto its name; remove the older one

A crash at any moment leaves the old folder or none, and at worst a hidden one that nothing ever reads. A
crash between the two renames leaves the old one under its hidden name (`displaced`).
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import CheckpointError, RunError

if TYPE_CHECKING:
    from penstock.runtime.transport.groups import Processes


MANIFEST = "manifest.json"
_REMOVED, _REPLACED, _WRITING = "removed", "replaced", "writing"


def write_folder(target: Path, write: Callable[[Path], None], processes: Processes) -> None:
    """Make `target` hold the files of `write` from all processes, or leave it as it was. Collective.

    Args:
        target: the same on all processes, on a file system that they share. An older checkpoint is replaced.
        write: called with a temporary folder. Each process writes files of its own names; may be collective.

    Raises:
        CheckpointError: anything but a checkpoint stands at `target`, or nothing can be written.
        RunError: another process failed; that one raises its own error. The temporary folder is then gone.
    """
    target = Path(os.path.abspath(target))
    temporary = target.parent / processes.gather(f".{target.name}.{_WRITING}-{secrets.token_hex(4)}")[0]
    try:
        together(processes, "make the folder", lambda: _prepare(temporary, target))
        together(processes, "write its part of the folder", lambda: write(temporary))
        names = _agreed_names(temporary, processes)[processes.index :: processes.count]
        entries = together(
            processes, "hash its part of the folder", lambda: {n: _describe(temporary / n) for n in names}
        )
        files = {name: entry for of_process in entries for name, entry in of_process.items()}

        def publish() -> None:
            if processes.index == 0:
                _publish(temporary, target, files)

        together(processes, "publish the folder", publish)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def check_folder(path: str | Path) -> None:
    """Raise CheckpointError unless `path` holds every file of its manifest, unaltered.

    Other files may lie there.
    """
    check_lengths(Path(path))  # of all first: that takes no time
    _check_files(Path(path), _read_manifest(Path(path)))


def check_lengths(path: Path) -> None:
    """Raise CheckpointError unless `path` holds every file of its manifest at its length. Reads none."""
    _check_files(path, _read_manifest(path), hashed=False)


def check_folder_together(path: Path, processes: Processes) -> None:
    """`check_folder` where each process reads some of the files; the error is raised on all. Collective."""

    def check() -> None:
        files = _read_manifest(path)
        if processes.index == 0:
            check_lengths(path)
        mine = sorted(files)[processes.index :: processes.count]
        _check_files(path, {name: files[name] for name in mine})

    together(processes, f"check checkpoint {path}", check)


def _check_files(path: Path, files: dict[str, dict[str, Any]], *, hashed: bool = True) -> None:
    for name, entry in files.items():
        file = path / name
        if not file.is_file():
            raise _broken(path, name, "the manifest lists this file and it is missing")
        size = file.stat().st_size
        if size != entry["size"]:
            raise _broken(path, name, f"it has {size} bytes and was written with {entry['size']}")
        if hashed and _sha256(file) != entry["sha256"]:
            raise _broken(path, name, "its contents differ from what was written (sha256)")


def remove_folder(path: Path) -> None:
    """Remove a checkpoint, whose name goes first: a crash leaves none that looks complete.

    Raises CheckpointError where it holds anything that is no part of a checkpoint.
    """
    _check_replaceable(path)
    removed = path.parent / f".{path.name}.{_REMOVED}-{secrets.token_hex(4)}"
    path.rename(removed)
    _flush(path.parent)
    shutil.rmtree(removed)


def looks_whole(path: Path) -> bool:
    """Whether `check_lengths` finds nothing."""
    try:
        check_lengths(path)
    except CheckpointError:
        return False
    return True


# of the hidden folders below, `name` is a pattern of the names that they had


def leftovers(folder: Path, name: str = "*") -> list[Path]:
    """Hidden folders of removals that were cut short, and of replacements whose new folder is complete."""
    replaced = (path for path in folder.glob(f".{name}.{_REPLACED}-*") if looks_whole(target_of(path)))
    return sorted([*folder.glob(f".{name}.{_REMOVED}-*"), *replaced])


def displaced(folder: Path, name: str = "*") -> list[Path]:
    """Hidden older folders of replacements that were killed before the new folder was complete."""
    return sorted(p for p in folder.glob(f".{name}.{_REPLACED}-*") if not looks_whole(target_of(p)))


def target_of(hidden: Path) -> Path:
    """The name of a hidden folder before it was hidden, or that it is written for."""
    return hidden.with_name(hidden.name.removeprefix(".").rpartition(".")[0])


def unfinished(folder: Path, name: str = "*") -> list[Path]:
    """Hidden folders of writes that are under way or were cut short."""
    return sorted(folder.glob(f".{name}.{_WRITING}-*"))


def together(processes: Processes, action: str, work: Callable[[], Any]) -> list[Any]:
    """Every process's result of `work`, which JSON can hold, or an error on all. Collective.

    A process that fails raises what `work` raised; the others a RunError that names it and the `action`.
    """
    try:
        result = work()
    except Exception as error:
        processes.gather((None, f"{type(error).__name__}: {error}"))
        raise
    gathered = processes.gather((result, None))
    for index, (_, message) in enumerate(gathered):
        if message is not None:
            raise RunError(f"process {index}", f"it could not {action}: {message}", "Fix that first")
    return [value for value, _ in gathered]


def _prepare(temporary: Path, target: Path) -> None:
    if os.path.lexists(target):
        _check_replaceable(target)
    try:
        temporary.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"folder {target}", f"it cannot be written ({error.strerror})", "Name a folder that you may write"
        ) from error


def _check_replaceable(target: Path) -> None:
    """Only a checkpoint may be replaced: a mistyped path must not cost anybody their files."""
    held = {str(file.relative_to(target)) for file in target.rglob("*") if not file.is_dir()}
    if not target.is_dir():
        held = {target.name}
    listed = {MANIFEST, *_read_manifest(target)} if MANIFEST in held else set()
    if foreign := sorted(held - listed):
        raise CheckpointError(
            f"folder {target}",
            f"it holds {foreign[0]}, which is no part of a checkpoint, and replacing it would lose that",
            "Name another folder, or move that one away first",
        )


def _agreed_names(folder: Path, processes: Processes) -> list[str]:
    names = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    for index, others in enumerate(processes.gather(names)):
        if others != names:
            raise CheckpointError(
                f"folder {folder.parent}",
                f"processes {processes.index} and {index} do not see the same files in it",
                "Name a folder on a file system that all processes share",
            )
    return names


def _describe(file: Path) -> dict[str, Any]:
    """The file's entry in the manifest."""
    _flush(file)
    return {"size": file.stat().st_size, "sha256": _sha256(file)}


def _publish(temporary: Path, target: Path, files: dict[str, dict[str, Any]]) -> None:
    manifest = temporary / MANIFEST
    manifest.write_text(json.dumps({"files": dict(sorted(files.items()))}, indent=1) + "\n", encoding="utf-8")
    _flush(manifest)
    for folder in (temporary, *(entry for entry in temporary.rglob("*") if entry.is_dir())):
        _flush(folder)
    aside = target.parent / f".{target.name}.{_REPLACED}-{secrets.token_hex(4)}"
    try:
        if os.path.lexists(target):  # a rename cannot replace a folder that holds files
            target.rename(aside)
        temporary.rename(target)
    except BaseException:  # Ctrl-C too
        if os.path.lexists(aside) and not os.path.lexists(target):
            aside.rename(target)
        raise
    _flush(target.parent)
    if os.path.lexists(aside):
        remove_hidden(aside)


def remove_hidden(path: Path) -> None:
    """Remove a hidden folder, or a link that stands in its place."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _read_manifest(path: Path) -> dict[str, dict[str, Any]]:
    file = path / MANIFEST
    if not path.is_dir():
        raise CheckpointError(
            f"checkpoint {path}", "there is no such folder", "Give the path of a checkpoint that was written"
        )
    if not file.is_file():
        raise _broken(path, MANIFEST, "a complete checkpoint has a manifest and this folder has none")
    try:
        files = json.loads(file.read_text(encoding="utf-8"))["files"]
        return {str(name): {"size": int(e["size"]), "sha256": str(e["sha256"])} for name, e in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _broken(path, MANIFEST, "the manifest itself is damaged") from error


def _broken(path: Path, name: str, rule: str) -> CheckpointError:
    return CheckpointError(f"checkpoint {path}: {name}", rule, "Take another checkpoint, or copy it again")


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _flush(path: Path) -> None:
    """Write a file, or a folder's list of names, to the disk, so that it survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
