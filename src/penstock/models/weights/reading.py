"""Read tensors from files into the memory of a GPU, by way of two pieces of pinned host memory in turn.

    host   read into A | read into B | await copy 1, read into A | await copy 2, read into B
    GPU                | copy 1 of A | copy 2 of B               | copy 3 of A

No more of a tensor is in host memory at any time.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from penstock.errors import CheckpointError
from penstock.runtime.device.copies import Copies
from penstock.runtime.device.stream import Moment, reach

_PIECE = 1 << 26  # bytes
_LENGTH = struct.Struct("<Q")  # of the header, in front of it


class PieceReader:
    """Reads ranges of files into tensors on a device.

    Args:
        piece: bytes of each of the two pieces
    """

    def __init__(self, copies: Copies, *, pinned: bool = True, piece: int = _PIECE) -> None:
        self._copies, self._turn = copies, 0
        self._pieces = [torch.empty(piece, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        self._copied: list[Moment | None] = [None, None]  # the last copy of each piece

    def read(self, file: int, start: int, into: Tensor) -> None:
        """Fill `into`, which is contiguous, from byte `start` of `file` on. Raises OSError."""
        for part in torch.split(into.reshape(-1).view(torch.uint8), len(self._pieces[0])):
            turn, self._turn = self._turn, 1 - self._turn
            if (copied := self._copied[turn]) is not None:
                reach(copied)
            here = self._pieces[turn][: len(part)]
            _read(file, start, memoryview(here.numpy()))  # type: ignore[arg-type]
            self._copied[turn] = self._copies.fill(part, here)
            start += len(part)


def _read(file: int, start: int, into: memoryview) -> None:
    while into:
        count = os.preadv(file, [into], start)
        if not count:
            raise OSError("it ends too early")
        into, start = into[count:], start + count


class TensorsOnDevice:
    """The tensors of one safetensors file, each of which `read` reads into memory on a device."""

    def __init__(self, path: Path, reader: PieceReader, device: torch.device) -> None:
        self._path, self._reader, self._device = path, reader, device
        self._file = os.open(path, os.O_RDONLY)
        (length,) = _LENGTH.unpack(os.pread(self._file, _LENGTH.size, 0))
        self._begin: int = _LENGTH.size + length
        self._header = json.loads(os.pread(self._file, length, _LENGTH.size))

    def read(self, name: str, dtype: Callable[[str], torch.dtype]) -> Tensor:
        """One tensor. dtype: of its name in a header. Raises CheckpointError."""
        entry = self._header[name]
        made = torch.empty(entry["shape"], dtype=dtype(entry["dtype"]), device=self._device)
        try:
            self._reader.read(self._file, self._begin + entry["data_offsets"][0], made)
        except OSError as error:
            rule = f"it cannot be read ({error.strerror or error})"
            raise CheckpointError(f"{name} in {self._path}", rule, "Copy the folder again") from error
        return made

    def close(self) -> None:
        os.close(self._file)
