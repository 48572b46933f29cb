"""A folder that is complete or absent.

Everything is written into a hidden sibling folder, hashed into a manifest, flushed to the disk, and only
then renamed onto its name. Whoever finds the name finds all of it; a crash at any moment leaves the old
folder or none, and at worst a hidden one that nothing ever reads. A crash between the two renames of a
replacement leaves the old one under a hidden name.
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
    """Make `target` hold what `write` writes, whole, or leave it as it was.

    Collective: every process calls it with the same target, on a file system that all share, and runs
    ``write(temporary_folder)``, which writes files under names of its own and may itself be collective. An
    older checkpoint at `target` is replaced; raises CheckpointError where anything else stands there, or
    nothing can be written. What fails on one process is raised there, and as a RunError that names it on all
    others; the temporary folder is then gone.
    """
    target = Path(os.path.abspath(target))
    temporary = target.parent / processes.gather(f".{target.name}.{_WRITING}-{secrets.token_hex(4)}")[0]
    try:
        together(processes, "make the folder", lambda: _prepare(temporary, target))
        together(processes, "write its part of the folder", lambda: write(temporary))
        names = _agreed_names(temporary, processes)
        share = names[processes.index :: processes.count]
        hashed = together(
            processes, "hash its part of the folder", lambda: [_describe(temporary, name) for name in share]
        )
        files = {name: entry for part in hashed for name, entry in part}
        mine = processes.index == 0
        together(
            processes, "publish the folder", lambda: _publish(temporary, target, files) if mine else None
        )
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def check_folder(path: str | Path) -> None:
    """Raise CheckpointError unless `path` holds every file of its manifest, unaltered.

    Files that the manifest does not list are left out of account.
    """
    path = Path(path)
    check_folder_quickly(path)
    _check_files(path, _read_manifest(path))


def check_folder_together(path: Path, processes: Processes) -> None:
    """check_folder by several processes, each of which reads its share; the error is raised on all."""

    def check() -> None:
        if processes.index == 0 or not (path / MANIFEST).is_file():  # one tells what is wrong with it
            check_folder_quickly(path)
        files = _read_manifest(path)
        share = sorted(files)[processes.index :: processes.count]
        _check_files(path, {name: files[name] for name in share})

    together(processes, f"check checkpoint {path}", check)


def check_folder_quickly(path: Path) -> None:
    """Raise CheckpointError unless `path` holds every file of its manifest, in its length. Reads none."""
    if not path.is_dir():
        raise CheckpointError(
            f"checkpoint {path}", "there is no such folder", "Give the path of a checkpoint that was written"
        )
    _check_files(path, _read_manifest(path), hashed=False)


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
    """Remove a checkpoint. Cut short it leaves none that looks whole: it loses its name first.

    Raises CheckpointError where anything stands in it that is no part of a checkpoint.
    """
    _check_replaceable(path)
    removed = path.parent / f".{path.name}.{_REMOVED}-{secrets.token_hex(4)}"
    path.rename(removed)
    _flush(path.parent)
    shutil.rmtree(removed)


def looks_whole(path: Path) -> bool:
    """As far as can be told without reading it."""
    try:
        check_folder_quickly(path)
    except CheckpointError:
        return False
    return True


def leftovers(folder: Path, name: str = "*") -> list[Path]:
    """Hidden folders of removals that were cut short, and of replacements where the new one stands.

    name: a pattern of what they were called
    """
    replaced = (path for path in folder.glob(f".{name}.{_REPLACED}-*") if looks_whole(target_of(path)))
    return sorted([*folder.glob(f".{name}.{_REMOVED}-*"), *replaced])


def displaced(folder: Path, name: str = "*") -> list[Path]:
    """Hidden folders that were about to be replaced when the write was killed, and where no new one stands.

    name: a pattern of their targets
    """
    return sorted(p for p in folder.glob(f".{name}.{_REPLACED}-*") if not looks_whole(target_of(p)))


def target_of(hidden: Path) -> Path:
    """What a hidden folder was called, or was to be."""
    return hidden.with_name(hidden.name.removeprefix(".").rpartition(".")[0])


def unfinished(folder: Path, name: str = "*") -> list[Path]:
    """Hidden folders of writes that are under way or were cut short. name: a pattern of their targets"""
    return sorted(folder.glob(f".{name}.{_WRITING}-*"))


def together(processes: Processes, deed: str, work: Callable[[], Any]) -> list[Any]:
    """Every process's result of `work` (JSON must hold it), or an error on all when it fails on any.

    The process that fails raises what `work` raised; the others a RunError that names it and the `deed`.
    """
    result, failure = None, None
    try:
        result = work()
    except Exception as error:
        failure = error
    told = processes.gather((result, None if failure is None else f"{type(failure).__name__}: {failure}"))
    if failure is not None:
        raise failure
    for index, (_, message) in enumerate(told):
        if message is not None:
            raise RunError(
                f"process {index}",
                f"it could not {deed}: {message}",
                "Mend that first",
            )
    return [value for value, _ in told]


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


def _describe(folder: Path, name: str) -> tuple[str, dict[str, Any]]:
    _flush(folder / name)
    return name, {"size": (folder / name).stat().st_size, "sha256": _sha256(folder / name)}


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
    """Remove one of the hidden folders, or the link that stood in its place."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _read_manifest(path: Path) -> dict[str, dict[str, Any]]:
    file = path / MANIFEST
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
    """Ask the disk to keep `path`, a file or a folder's list of names, through a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
