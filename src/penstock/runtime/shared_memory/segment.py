"""A segment: memory of one process that the other processes of its host map too, and how they wait on it.

    0          words      a token, whether its process has ended, of each channel: messages and bytes
    RINGS      entries    of each channel: where each message of the step lies (messages.py)
    STATES     words      of each block: 0 once its receiver has freed it (blocks.py)
    SLOTS      2 slots    vectors for everyone (processes.py)
    BLOCKS     bytes      the messages

Each word has one writer, so that none needs a lock. x86 makes stores visible in their order: data is visible
before the word that announces it. A segment takes addresses, and memory only where it is touched. It has no
name in any file system: the system frees it with the last process that maps it, killed or not.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import secrets
import select
import sys
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta

import torch
from torch import Tensor

from penstock.runtime.ranks import GroupRanks

RINGS = 1 << 16
STATES = RINGS + (1 << 32)
SLOTS = STATES + (1 << 24)
SLOT = 1 << 28
BLOCKS = SLOTS + 2 * SLOT
_NAME = "penstock"
_LEAST = 1 << 36  # bytes of addresses

# words at the start
_TOKEN, _ENDED, GATHERED = 0, 1, 2
CHANNELS = 8

_SLICE = 0.05  # seconds of sleep between two checks that the other process is alive
_SPINS = 500  # reads of a word before the sleep: some 0.1 ms, longer than a wake-up takes
_FUTEX, _WAIT, _WAKE, _ALL = 202, 0, 1, (1 << 31) - 1  # on x86-64


class EndedError(RuntimeError):
    """The process of a segment has ended, or will send nothing more. rank: of that process, if known"""

    def __init__(self, rank: int | None) -> None:
        super().__init__("connection closed: the process at the other end has ended")
        self.rank = rank


class Segment:
    """A mapped segment.

    Args:
        descriptor: its file, which may be closed afterwards.
        process: the process that made it.
        rank: that process among those that communicate.
    """

    def __init__(self, descriptor: int, process: int, rank: int | None = None) -> None:
        self.rank = rank
        self._memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        self.free(BLOCKS, mmap.PAGESIZE)  # fails now where a sandbox lacks it
        self.words = (ctypes.c_uint64 * (SLOTS // 8)).from_buffer(self._memory)
        self._address = ctypes.addressof(self.words)
        self._storage = torch.frombuffer(self._memory, dtype=torch.uint8).untyped_storage()
        self._syscall = ctypes.CDLL(None).syscall
        watched = os.pidfd_open(process)
        self._close = weakref.finalize(self, os.close, watched)
        self._dies = select.poll()
        self._dies.register(watched, select.POLLIN)

    @property
    def nbytes(self) -> int:
        """The size of its address range."""
        return len(self._memory)

    def tensor(self, at: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The memory from byte `at` on, as a tensor."""
        empty = torch.empty(0, dtype=dtype, device="cpu")  # whatever the user's default device
        return empty.set_(self._storage, at // dtype.itemsize, shape)  # type: ignore[call-overload, no-any-return]

    def separate(self, at: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The same as a tensor with a storage of its own, whose users can be counted."""
        empty = torch.empty(0, dtype=dtype, device="cpu")
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        if not nbytes:
            return empty.view(shape)
        part = torch.frombuffer(self._memory, dtype=torch.uint8, count=nbytes, offset=at)
        return empty.set_(part.untyped_storage(), 0, shape)  # type: ignore[call-overload, no-any-return]

    def free(self, at: int, nbytes: int) -> None:
        """Return memory to the system; both are multiples of a page."""
        self._memory.madvise(mmap.MADV_REMOVE, at, nbytes)

    # ---- announcements

    def announce(self, word: int, value: int) -> None:
        """Write a word that others may wait for."""
        self.words[word] = value
        self._futex(word, _WAKE, _ALL, None)

    def wait(self, word: int, least: int, limit: timedelta, spin: bool, also: Sequence[Segment] = ()) -> None:
        """Wait until the word is `least` or more.

        spin: whether to poll for a while before the sleep
        also: other segments, whose processes may end only after their word has reached `least`

        Raises RuntimeError after `limit`, EndedError where the process of a segment has ended.
        """
        words = self.words
        for _ in range(_SPINS if spin else 1):
            if words[word] >= least:
                return
        deadline = time.monotonic() + limit.total_seconds()
        pause = ctypes.byref(_timespec(min(_SLICE, limit.total_seconds())))
        while (seen := words[word]) < least:
            if self._futex(word, _WAIT, seen & 0xFFFFFFFF, pause) == 0:
                continue
            # the end of a process counts only if its word, read afterwards, is still too small
            for segment in (self, *also):
                if segment._has_ended and segment.words[word] < least:
                    raise EndedError(segment.rank)
            if time.monotonic() >= deadline and words[word] < least:
                raise RuntimeError("timed out waiting in shared memory")

    @property
    def _has_ended(self) -> bool:
        return bool(self.words[_ENDED] or self._dies.poll(0))

    def _futex(self, word: int, op: int, value: int, pause: object) -> int:
        at = ctypes.c_void_p(self._address + 8 * word)
        return int(self._syscall(_FUTEX, at, op, value, pause, None, 0))

    # ---- end

    def end(self) -> None:
        """Announce that this process will send nothing more."""
        self.words[_ENDED] = 1

    def close(self) -> None:
        """Close the process's descriptor. The memory lives as long as its last tensor."""
        self._close()


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _timespec(seconds: float) -> _Timespec:
    return _Timespec(int(seconds), int(seconds % 1 * 1e9))


def open_segments(ranks: GroupRanks) -> list[Segment] | None:
    """A segment of each process, in order; None where they cannot all map all of them. Collective."""
    token = secrets.randbits(60)
    descriptor = _create(token)
    try:
        everyone = ranks.all_gather(torch.tensor([os.getpid(), descriptor, token]))
        segments = _open([tuple(map(int, process)) for process in everyone])
        complete = torch.tensor([segments is not None])
        if all(map(bool, ranks.all_gather(complete))):
            return segments
        for segment in segments or ():
            segment.close()
        return None
    finally:
        if descriptor >= 0:
            os.close(descriptor)  # by now everyone has mapped it


def _create(token: int) -> int:
    """The descriptor of a new segment's file, or -1 where the system lacks a feature that it needs."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return -1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    descriptor = -1
    try:
        descriptor = os.memfd_create(_NAME)
        os.ftruncate(descriptor, BLOCKS + max(_LEAST, 4 * memory))
        os.pwrite(descriptor, token.to_bytes(8, sys.byteorder), 8 * _TOKEN)
    except (OSError, AttributeError):  # a Python built for an old system lacks some of these functions
        if descriptor >= 0:
            os.close(descriptor)
        return -1
    return descriptor


def _open(everyone: Sequence[tuple[int, ...]]) -> list[Segment] | None:
    """everyone: process, descriptor and token of each"""
    segments: list[Segment] = []
    for rank, (process, descriptor, token) in enumerate(everyone):
        try:
            # of a process on another host or container: the file is missing, or another one
            path = f"/proc/{process}/fd/{descriptor}"
            if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
                raise OSError
            opened = os.open(path, os.O_RDWR)
            try:
                if int.from_bytes(os.pread(opened, 8, 8 * _TOKEN), sys.byteorder) != token:
                    raise OSError
                segments.append(Segment(opened, process, rank))
            finally:
                os.close(opened)
        except (OSError, ValueError, AttributeError):
            for segment in segments:
                segment.close()
            return None
    return segments
