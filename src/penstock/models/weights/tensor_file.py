"""A safetensors file: read tensor by tensor; written in pieces by several threads, which hash them.

The file begins with the length of its header in 8 bytes. The header is JSON: dtype, shape and offsets of each
tensor. The tensors follow, wider dtypes first, so that each begins at a multiple of its width.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.errors import CheckpointError
from penstock.models.weights.folder import ManifestEntry, made_entry, piece_of
from penstock.models.weights.reading import Reader
from penstock.private import SAFETENSORS_TYPES
from penstock.reading import LARGEST_JSON, open_regular, size
from penstock.runtime.device.copies import PIECE, Workers

_LENGTH = 8  # bytes with the header's length, before the header
_END = 2048  # bytes of each end of a weight that a fingerprint reads

# torch's dtypes by their names in safetensors, whose own table lacks a dtype that it writes
DTYPES: dict[str, Any] = {**SAFETENSORS_TYPES, "F8_E8M0": torch.float8_e8m0fnu}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class TensorFile:
    """The tensors of a safetensors file, which are read one at a time; a context that closes the file.

    The file is not mapped into memory: training must not depend on later changes of it, and pages of a map
    that were read would count as the process's memory.

    Raises CheckpointError if it is no complete safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        remedy = "Copy or write it again"
        try:
            with open_regular(path) as opened:
                length = int.from_bytes(opened.read(_LENGTH), "little")
                if LARGEST_JSON < length < path.stat().st_size:  # a wrong length gets safe_open's error
                    rule = f"its header has {length:,} bytes, and {size(LARGEST_JSON)} are read at most"
                    raise CheckpointError(str(path), rule, "Write its tensors into several files")
                with safe_open(path, framework="pt", backend="pread"):  # fits its length
                    header: dict[str, Any] = json.loads(opened.read(length))
                self._file = os.dup(opened.fileno())
        except SafetensorError as cause:
            rule = f"it is no complete safetensors file ({cause})"
            raise CheckpointError(f"{path} of {path.stat().st_size} bytes", rule, remedy) from cause
        except (OSError, MemoryError) as cause:  # safetensors maps a file before it looks at its length
            rule = f"it cannot be read ({getattr(cause, 'strerror', None) or cause})"
            raise CheckpointError(str(path), rule, remedy) from cause
        header.pop("__metadata__", None)
        self._begin, self._header = _LENGTH + length, header

    def names(self) -> list[str]:
        """The names of the tensors, in the order of the header."""
        return list(self._header)

    def like(self, name: str) -> Tensor:
        """One tensor without its values, on the meta device. Raises CheckpointError, as `read` does."""
        shape, dtype = self._kind(name)
        return torch.empty(shape, dtype=dtype, device="meta")

    def read(
        self, name: str, reader: Reader, rows: slice | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """One tensor, in the memory of the reader's device.

        Args:
            rows: range of the first dimension to read; values of other rows are arbitrary. None: all
            dtype: cast a floating-point tensor to this dtype, if that is a floating-point one; None: no cast

        Raises CheckpointError if the tensor cannot be read, or has a dtype that `DTYPES` lacks.
        """
        shape, stored = self._kind(name)
        row = math.prod(shape[1:])
        begin, end = (0, math.prod(shape)) if rows is None else (rows.start * row, rows.stop * row)
        made = reader.empty(shape, stored, slice(begin * stored.itemsize, end * stored.itemsize))
        offset = self._begin + self._header[name]["data_offsets"][0] + begin * stored.itemsize
        try:
            reader.read(self._file, offset, made.reshape(-1)[begin:end])
        except OSError as error:
            rule = f"it cannot be read ({error.strerror or error})"
            raise CheckpointError(f"{name} in {self.path}", rule, "Copy the folder again") from error
        if dtype is None or dtype == stored or not (stored.is_floating_point and dtype.is_floating_point):
            return made
        cast = reader.empty(shape, dtype, slice(begin * dtype.itemsize, end * dtype.itemsize))
        cast.reshape(-1)[begin:end] = made.reshape(-1)[begin:end]
        return cast

    def described(self, name: str) -> tuple[str, list[int], list[bytes]]:
        """The dtype's name, the shape, and the first and last `_END` bytes, or fewer, of one tensor."""
        entry = self._header[name]
        begin, end = (self._begin + offset for offset in entry["data_offsets"])
        count = min(_END, end - begin)
        ends = [os.pread(self._file, count, at) for at in (begin, end - count)]
        return entry["dtype"], entry["shape"], ends

    def _kind(self, name: str) -> tuple[list[int], torch.dtype]:
        entry = self._header[name]
        if entry["dtype"] not in DTYPES:
            rule = f"its dtype is {entry['dtype']}, which is not read"
            raise CheckpointError(f"{name} in {self.path}", rule, "Convert the weights to another first")
        return entry["shape"], DTYPES[entry["dtype"]]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)


@contextmanager
def open_all(paths: Iterable[Path]) -> Iterator[dict[str, TensorFile]]:
    """Open several files for the block; yields the file of each tensor. Raises CheckpointError."""
    with ExitStack() as opened:
        files = [opened.enter_context(TensorFile(path)) for path in paths]
        yield {name: file for file in files for name in file.names()}


def widest_first(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors in the order of a file: wider dtypes first, otherwise unchanged."""
    return dict(sorted(tensors.items(), key=lambda item: -item[1].itemsize))


def write_tensors(
    file: Path,
    layout: Mapping[str, Tensor],
    values: Iterable[tuple[str, Tensor]] | None = None,
    buffers: Collection[str] = (),
) -> ManifestEntry:
    """Write a file, and return its entry in a manifest.

    Args:
        layout: shapes and dtypes by name, in the order of the file (`widest_first`); may be on meta
        values: the tensors in that order, which may be made one by one; None takes those of `layout`
        buffers: names that may have infinity, as a mask. The entry names the first other tensor with NaN or
            infinity

    Raises CheckpointError for a dtype that safetensors lacks.
    """
    odd = ""
    with file.open("wb", buffering=0) as opened, Workers() as workers:
        pieces = _Pieces(opened, workers)
        pieces.add(memoryview(_header(layout)))
        for expected, (name, value) in zip(layout, values or layout.items(), strict=True):
            assert name == expected, f"{name} in the place of {expected}"
            flat = value.detach().cpu().contiguous().reshape(-1)
            pieces.add(memoryview(flat.view(torch.uint8).numpy()))  # type: ignore[arg-type]
            if not odd and name not in buffers and not is_finite(flat):
                odd = name
        pieces.end()
    return made_entry(pieces.size, pieces.digest(), piece_of(pieces.size), odd)


class _Pieces:
    """Writes a file piece by piece: the thread that writes a piece hashes it, from the tensors' own memory.

    size: bytes so far
    """

    def __init__(self, file: FileIO, workers: Workers) -> None:
        self.size = 0
        self._file, self._workers = file, workers
        self._hashes: list[Any] = []
        self._parts: list[memoryview] = []  # of the next piece
        self._room = PIECE

    def add(self, data: memoryview) -> None:
        while data:
            part, data = data[: self._room], data[self._room :]
            self._parts.append(part)
            self._room -= len(part)
            if not self._room:
                self.end()

    def end(self) -> None:
        """Write the memory added so far as one piece."""
        if self._parts:
            digest = hashlib.sha256()
            self._hashes.append(digest)
            self._workers.do(partial(self._write, self._parts, self.size, digest))
        self.size += PIECE - self._room
        self._parts, self._room = [], PIECE

    def _write(self, parts: Sequence[memoryview], start: int, digest: Any) -> None:
        for part in parts:
            digest.update(part)
            while part:
                count = os.pwrite(self._file.fileno(), part, start)  # ValueError once it is closed
                part, start = part[count:], start + count

    def digest(self) -> str:
        """The hash, once all is written."""
        first, *others = self._hashes
        if not others:
            return str(first.hexdigest())
        return hashlib.sha256(b"".join(digest.digest() for digest in self._hashes)).hexdigest()


def is_finite(flat: Tensor) -> bool:
    """Whether all values are finite. A finite sum proves it; as a sum may overflow, else values are checked.

    The sum takes 3 % of the time to hash and write a file; checking each value takes as long as both.
    """
    if not flat.is_floating_point() or flat.itemsize == 1:  # torch adds no 8-bit floats
        return True
    return math.isfinite(flat.sum().item()) or bool(flat.isfinite().all())


def _header(layout: Mapping[str, Tensor]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, value in layout.items():
        if value.dtype not in NAMES:
            raise CheckpointError(
                f"{name} of {value.dtype}", "safetensors has no such dtype", "Convert it to another first"
            )
        header[name] = {"dtype": NAMES[value.dtype], "shape": list(value.shape),
                        "data_offsets": [end, end + value.nbytes]}  # fmt: skip
        end += value.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(_LENGTH, "little") + text


# ---- The fingerprint of the base model that an adapter belongs to
#
# A digest of each weight's name, dtype, shape and ends. Reading all of a large model would take as long as
# loading it. Fine-tuning changes most entries of a weight, so that a model of the same shape with other
# weights has another fingerprint. The distribution of tensors over files has no effect.


def fingerprint_of_files(files: Sequence[Path]) -> str:
    """The fingerprint of the weights in safetensors files."""
    with open_all(files) as file_of:
        return _digest({name: file.described(name) for name, file in file_of.items()})


def fingerprint_of_tensors(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """The same for weights in memory, with the names and shapes of their files."""
    described = {}
    for name, tensor in tensors:
        flat, count = tensor.detach().reshape(-1), max(1, _END // tensor.element_size())
        ends = [
            end.cpu().contiguous().view(torch.uint8).numpy().tobytes()
            for end in (flat[:count], flat[-count:])
        ]
        described[name] = NAMES.get(tensor.dtype, str(tensor.dtype)), list(tensor.shape), ends
    return _digest(described)


def _digest(described: Mapping[str, tuple[str, list[int], list[bytes]]]) -> str:
    digest = hashlib.sha256()
    for name, (dtype, shape, ends) in sorted(described.items()):
        content = f"{dtype} {shape} ".encode() + b"".join(ends)
        digest.update(name.encode() + b" " + hashlib.sha256(content).digest())
    return digest.hexdigest()
