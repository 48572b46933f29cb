"""Read ranges of files into tensors: directly into host memory, and to a GPU through two pieces of it.

    host   read into A | read into B | await copy 1, read into A | await copy 2, read into B
    GPU                | copy 1 of A | copy 2 of B               | copy 3 of A

At any time, only two pieces of a GPU's tensor are in host memory, which is pinned.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from penstock.private import TO_COPY, TorchDispatchMode
from penstock.reading import size
from penstock.runtime.device.copies import Copies, CudaCopies
from penstock.runtime.device.footprints import is_held_elsewhere
from penstock.runtime.device.stream import Moment, reach

aten = torch.ops.aten

_PIECE = 1 << 26  # bytes
_MAPPED = 1 << 17  # bytes from which a tensor in host memory has a map of its own
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, of Linux 5.14 and newer
_libc = ctypes.CDLL(None)
_JOINS = {aten.stack.default: aten.stack.out, aten.cat.default: aten.cat.out}
_COPIES = {TO_COPY, aten.clone.default}


class Reader(Protocol):
    """Makes tensors in the memory of one device, and reads ranges of files into them."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype, part: slice | None = None) -> Tensor:
        """A contiguous tensor with arbitrary values. part: the range of bytes that will be used; None: all"""

    def read(self, file: int, start: int, into: Tensor) -> None:
        """Fill `into`, which is contiguous, from byte `start` of `file` on. Raises OSError."""


class Scratch(NamedTuple):
    """A memory map for a part of one tensor after another. before: its bytes before the part"""

    memory: Tensor
    before: int


class HostReader:
    """Reads into tensors in host memory: each byte is copied once, from the kernel's page cache.

    A large tensor has a memory map of its own, which the kernel frees with it. malloc would place temporary
    tensors, from which others are made, between those that stay, and keep the gaps: a process would take more
    memory than its tensors and the one being read. The kernel makes the pages of a map at once: one by one,
    as a read writes to them, pages take half as long again as the read.

    A tensor of which only a part is used has pages for that part, in a scratch that later tensors reuse.
    """

    def __init__(self) -> None:
        self._scratches: list[Scratch] = []

    def empty(self, shape: Sequence[int], dtype: torch.dtype, part: slice | None = None) -> Tensor:
        """See `Reader.empty`. Raises MemoryError."""
        count = math.prod(shape) * dtype.itemsize
        if count < _MAPPED:
            return torch.empty(shape, dtype=dtype)
        if part is None or part == slice(0, count):
            made = _mapped(count)
            _make_pages(made)
        else:
            made = self._in_scratch(count, part)
        return made.view(dtype).reshape(shape)

    def _in_scratch(self, count: int, part: slice) -> Tensor:
        """`count` bytes, with `part` where earlier tensors had theirs: the scratch has pages there."""
        scratch = self._free_scratch(part.start, count - part.start)
        _make_pages(scratch.memory[scratch.before :][: part.stop - part.start])
        return scratch.memory[scratch.before - part.start :][:count]

    def _free_scratch(self, before: int, after: int) -> Scratch:
        """A scratch without users, with room on both sides of the part. Other unused ones are dropped."""
        free = [scratch for scratch in self._scratches if not is_held_elsewhere(scratch.memory)]
        for scratch in free:
            if scratch.before >= before and len(scratch.memory) - scratch.before >= after:
                return scratch
        self._scratches = [s for s in self._scratches if all(s is not other for other in free)]
        aligned = -(-before // mmap.PAGESIZE) * mmap.PAGESIZE
        self._scratches.append(Scratch(_mapped(aligned + after), aligned))
        return self._scratches[-1]

    def read(self, file: int, start: int, into: Tensor) -> None:
        """See `Reader.read`."""
        _read(file, start, memoryview(into.reshape(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]


class PieceReader:
    """Reads into tensors on `device`, a GPU.

    Args:
        piece: bytes of each of the two pieces
    """

    def __init__(
        self, copies: Copies, device: torch.device, *, pinned: bool = True, piece: int = _PIECE
    ) -> None:
        self._copies, self._device, self._turn = copies, device, 0
        self._pieces = [torch.empty(piece, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        self._copied: list[Moment | None] = [None, None]  # the last copy of each piece

    def empty(self, shape: Sequence[int], dtype: torch.dtype, part: slice | None = None) -> Tensor:
        """See `Reader.empty`."""
        return torch.empty(shape, dtype=dtype, device=self._device)

    def read(self, file: int, start: int, into: Tensor) -> None:
        """See `Reader.read`."""
        for part in torch.split(into.reshape(-1).view(torch.uint8), len(self._pieces[0])):
            turn, self._turn = self._turn, 1 - self._turn
            if (copied := self._copied[turn]) is not None:
                reach(copied)
            here = self._pieces[turn][: len(part)]
            _read(file, start, memoryview(here.numpy()))  # type: ignore[arg-type]
            self._copied[turn] = self._copies.fill(part, here)
            start += len(part)


def reader_for(device: torch.device) -> Reader:
    """The reader into the memory of `device`."""
    return HostReader() if device.type == "cpu" else PieceReader(CudaCopies(device), device)


def maps_for_results(device: torch.device) -> AbstractContextManager[object]:
    """Inside, a large tensor made from others on `device` gets memory as a tensor that its reader reads."""
    if device.type != "cpu":
        return nullcontext()
    return _MapsForResults()  # type: ignore[no-untyped-call]


class _MapsForResults(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives maps of their own to results of conversions: tensors that are joined, cast or copied.

    All other results of transformers' conversions are views.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _JOINS and all(part.device.type == "cpu" for part in args[0]):
            like = func([part.to("meta") for part in args[0]], *args[1:], **kwargs)
            return _JOINS[func](*args, **kwargs, out=HostReader().empty(like.shape, like.dtype))
        if func in _COPIES:
            source, device = args[0], kwargs.get("device") or args[0].device
            if source.device.type == device.type == "cpu":
                dtype = kwargs.get("dtype") or source.dtype
                return HostReader().empty(source.shape, dtype).copy_(source)
        return func(*args, **kwargs)


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out. The host's allocator has no exception type of its own."""
    kinds = MemoryError, torch.OutOfMemoryError
    return isinstance(error, kinds) or "DefaultCPUAllocator: " in str(error)


def _mapped(count: int) -> Tensor:
    """A map of bytes, without pages. Raises MemoryError."""
    try:
        return torch.frombuffer(mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE), dtype=torch.uint8)
    except OSError as error:
        raise MemoryError(f"no room for a tensor of {size(count)}") from error


def _make_pages(tensor: Tensor) -> None:
    """Make the kernel allocate the pages of a contiguous tensor's memory at once; values do not change.

    Pages that are allocated one by one, at the first write, take longer; older kernels do only that.
    MAP_POPULATE is not used, as Python's mmap holds its lock meanwhile: the thread that hashes files waited
    for it. The request goes in pieces, as the process can map nothing else meanwhile.
    """
    if sys.platform != "linux":
        return
    begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    begin -= begin % mmap.PAGESIZE
    for start in range(begin, end, _PIECE):
        count = ctypes.c_size_t(min(_PIECE, end - start))
        _libc.madvise(ctypes.c_void_p(start), count, _POPULATE_WRITE)


def _read(file: int, start: int, into: memoryview) -> None:
    while into:
        count = os.preadv(file, [into], start)
        if not count:
            raise OSError("it ends too early")
        into, start = into[count:], start + count
