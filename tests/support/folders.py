"""Folders with a manifest."""

from __future__ import annotations

from pathlib import Path

from penstock.models.weights.folder import check_lengths
from penstock.models.weights.hashes import hashed_meanwhile
from penstock.runtime.transport.groups import OneProcess


def check_folder(path: str | Path) -> None:
    """Raise CheckpointError unless `path` holds every file of its manifest, unaltered."""
    check_lengths(Path(path))
    with hashed_meanwhile(Path(path), OneProcess()):
        pass


def flip(file: Path, place: int = -1) -> None:
    """Flip a bit of the byte at `place`."""
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)
