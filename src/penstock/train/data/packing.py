"""Packs documents into rows, by their lengths alone. No text and no tensors.

A document longer than a row is cut into pieces as long as a row; its last piece may be shorter.
With rows of 8 tokens and documents a (5), b (10), c (3) and d (3), b becomes pieces of 8 and 2:

    none         a a a a a        b b b b b b b b   b b              c c c   d d d
    sequential   a a a a a        b b b b b b b b   b b c c c d d d
    best_fit     b b b b b b b b  a a a a a c c c   d d d b b
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]
SHORTEST = 2  # nothing predicts the first token of a document, so the loss of a single token is none


class Pieces(NamedTuple):
    """Documents end to end, or parts of long ones: where each begins, and its number of tokens."""

    starts: Numbers
    lengths: Numbers


class Packing(NamedTuple):
    """The pieces in each row, by number: those of row r are pieces[bounds[r] : bounds[r + 1]]."""

    pieces: Numbers
    bounds: Numbers

    @classmethod
    def of(cls, rows: Sequence[list[int]]) -> Packing:
        pieces = np.array([*chain.from_iterable(rows)], dtype=np.int64)
        return cls(pieces, np.cumsum([0, *map(len, rows)], dtype=np.int64))

    @property
    def size(self) -> int:
        """How many rows there are."""
        return len(self.bounds) - 1

    def row(self, index: int) -> Numbers:
        return self.pieces[self.bounds[index] : self.bounds[index + 1]]


def cut(documents: Numbers, capacity: int, overlong: str = "cut", shortest: int = SHORTEST) -> Pieces:
    """The pieces of documents of these lengths, in order: none longer than `capacity`.

    overlong: a longer document is cut into several, truncated (its end is left out), or dropped
    shortest: tokens of a piece, at least; shorter ones are left out
    """
    counts = -(-documents // capacity)
    if overlong != "cut":
        counts = np.minimum(counts, 1) if overlong == "truncate" else counts * (counts == 1)
    document = np.repeat(np.arange(len(documents)), counts)  # of each piece
    nth = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)  # within its document
    offset = nth * capacity
    starts = (np.cumsum(documents) - documents)[document] + offset
    lengths = np.minimum(documents[document] - offset, capacity)
    kept = lengths >= shortest
    return Pieces(starts[kept], lengths[kept])


def one_each(lengths: Numbers, capacity: int) -> Packing:
    """A row for each piece."""
    return Packing(np.arange(len(lengths)), np.arange(len(lengths) + 1))


def sequential(lengths: Numbers, capacity: int) -> Packing:
    """In order: a piece that does not fit begins the next row."""
    rows: list[list[int]] = []
    free = 0
    for piece, length in enumerate(lengths.tolist()):
        if length > free:
            rows.append([])
            free = capacity
        rows[-1].append(piece)
        free -= length
    return Packing.of(rows)


def best_fit(lengths: Numbers, capacity: int) -> Packing:
    """The longest first, each into the row that it leaves the least room in: best-fit decreasing.

    It takes at most 11/9 of the fewest possible rows and a few more (Johnson 1973). Free spaces are kept
    sorted, so that a hundred thousand pieces take a moment.
    """
    rows: list[list[int]] = []
    with_free: dict[int, list[int]] = {}
    spaces: list[int] = []  # the keys of with_free, sorted
    for piece in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[piece])
        at = bisect_left(spaces, length)
        if at == len(spaces):
            row, free = len(rows), capacity
            rows.append([])
        else:
            free = spaces[at]
            row = with_free[free].pop()
            if not with_free[free]:
                del with_free[free], spaces[at]
        rows[row].append(piece)
        left = free - length
        if left:
            if left not in with_free:
                with_free[left] = []
                insort(spaces, left)
            with_free[left].append(row)
    return Packing.of(rows)


PACKINGS: Mapping[str, Callable[[Numbers, int], Packing]] = {
    "none": one_each,
    "sequential": sequential,
    "best_fit": best_fit,
}
