"""Pages of host memory, made before anything is written to them."""

from __future__ import annotations

import ctypes
import mmap
import sys

from torch import Tensor

_PIECE = 1 << 26  # bytes
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, of Linux 5.14 and newer
_libc = ctypes.CDLL(None)


def make_pages(tensor: Tensor) -> None:
    """Ask the kernel for the pages of a contiguous tensor's memory at once; its values stay as they are.

    One by one, as they are written to, they take longer. A kernel that does not know how makes them so.
    Not MAP_POPULATE, for which Python's mmap holds its lock: the thread that hashes the files waited for it.
    In pieces, as the process can map nothing else meanwhile.
    """
    if sys.platform != "linux":
        return
    begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    begin -= begin % mmap.PAGESIZE
    for start in range(begin, end, _PIECE):
        count = ctypes.c_size_t(min(_PIECE, end - start))
        _libc.madvise(ctypes.c_void_p(start), count, _POPULATE_WRITE)
