"""Folders with a manifest."""

from __future__ import annotations

import shutil
from pathlib import Path

from penstock.models.weights.folder import MANIFEST, check_lengths, write_folder
from penstock.models.weights.hashes import hashed_meanwhile
from penstock.runtime.ranks import Ranks


def check_folder(path: str | Path) -> None:
    """Raise CheckpointError unless `path` holds every file of its manifest, unaltered."""
    check_lengths(Path(path))
    with hashed_meanwhile(Path(path), Ranks()):
        pass


def relist(folder: Path) -> None:
    """Write the manifest anew, so that it lists what the folder holds now."""
    (folder / MANIFEST).unlink()
    kept = folder.rename(folder.with_name(f"{folder.name}-before"))

    def copy(to: Path) -> None:
        shutil.copytree(kept, to, dirs_exist_ok=True)

    write_folder(folder, copy, Ranks())
    shutil.rmtree(kept)


def flip(file: Path, place: int = -1) -> None:
    """Flip a bit of the byte at `place`."""
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)
