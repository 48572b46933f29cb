"""All-gathers of vectors over shared memory, between the ranks of one host.

Each rank has two slots, which it uses in turn. It writes vector n + 2 over vector n only when all ranks have
written vector n + 1, and so have read vector n.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

import torch
from torch import Tensor

from penstock.runtime.ranks import Started
from penstock.runtime.shared_memory.segment import GATHERED, SLOT, SLOTS, Segment

_HEAD = 64  # bytes in front of a vector; the first word is its length


class SharedVectors:
    """The exchanges of `rank`.

    Args:
        segments: of the ranks, in order
        spin: see Segment.wait
    """

    def __init__(self, rank: int, segments: Sequence[Segment], spin: bool) -> None:
        self._rank, self._segments, self._spin, self._count = rank, segments, spin, 0

    def start(self, mine: Tensor) -> Started | None:
        """Begin an exchange of vectors, which may differ in length. None if one does not fit."""
        if mine.nbytes > SLOT - _HEAD:
            return None
        self._count += 1
        segment, at = self._segments[self._rank], self._slot(self._count)
        segment.tensor(at, (1,), torch.int64).fill_(mine.nbytes)
        segment.tensor(at + _HEAD, mine.shape, mine.dtype).copy_(mine)
        segment.announce(GATHERED, self._count)
        everyone: list[Tensor] = []
        return _SharedGathering(self, self._count, mine.dtype, everyone), everyone

    def read(self, count: int, dtype: torch.dtype, limit: timedelta) -> list[Tensor]:
        """Vector `count` of every rank, once it is written."""
        at, vectors = self._slot(count), []
        until = time.monotonic() + limit.total_seconds()
        for rank, segment in enumerate(self._segments):
            left = timedelta(seconds=max(0.0, until - time.monotonic()))
            segment.wait(GATHERED, count, left, self._spin, self._segments[rank + 1 :])
            length = int(segment.tensor(at, (1,), torch.int64))
            vectors.append(segment.tensor(at + _HEAD, (length // dtype.itemsize,), dtype).clone())
        return vectors

    @staticmethod
    def _slot(count: int) -> int:
        return SLOTS + count % 2 * SLOT


class _SharedGathering:
    def __init__(self, vectors: SharedVectors, count: int, dtype: torch.dtype, into: list[Tensor]) -> None:
        self._vectors, self._count, self._dtype, self._into = vectors, count, dtype, into

    def wait(self, limit: timedelta) -> object:
        """Wait for all vectors, and fill the list with them."""
        self._into[:] = self._vectors.read(self._count, self._dtype, limit)
        return True
