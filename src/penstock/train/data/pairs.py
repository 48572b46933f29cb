"""Rows of preferences: a row of the data is a pair, two documents that become two rows of a batch.

store     chosen 0 | rejected 0 | chosen 1 | rejected 1 | ...     documents end to end
row 0     (chosen 0, rejected 0)                                   so sampling, dealing and holding out
batch     chosen 0                                                 never part the two
          rejected 0
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

import numpy as np
import torch

from penstock.batch.loss import IGNORED
from penstock.batch.row_loss import REFERENCE
from penstock.train.data.labelled import with_mask
from penstock.train.data.packing import Numbers, Packing, Pieces
from penstock.train.data.rows import DocumentLayout, Piece, Rows, StoredRows
from penstock.train.data.store import Store


@dataclass(frozen=True)
class ReferringLayout(DocumentLayout):
    """Microbatches of whole completions. refers: whether they have their reference log-probabilities"""

    refers: bool = False

    @property
    def ignores(self) -> bool:
        return False  # a row that replaced a missing one would count in the loss

    def content(self, rows: Rows, chosen: Sequence[int]) -> list[dict[str, Any]]:
        """Microbatches as long as the longest of their rows."""
        return [self._group(rows, group) for group in self.groups(rows, chosen, sum(self.calls))]

    def order(self, rows: Rows, chosen: Sequence[int]) -> list[int]:
        """The rows of the data in the order in which `content` has them."""
        return [*chain.from_iterable(self.groups(rows, chosen, sum(self.calls)))]

    def linked(self, rows: StoredRows, steps: Iterable[Sequence[int]] = ()) -> StoredRows:
        """The rows, each with the other row that the loss also reads, if it reads one.

        steps: the rows of each step of an epoch
        """
        return rows

    @abstractmethod
    def referred(self, rows: Rows, chosen: Sequence[int]) -> list[dict[str, Any]]:
        """Microbatches for the reference model, two rows for each of the data, in `order`."""

    @abstractmethod
    def _group(self, rows: Rows, group: Sequence[int]) -> dict[str, Any]:
        """The microbatch of these rows."""

    def _refer(
        self, microbatch: dict[str, Any], rows: Rows, group: Sequence[int], columns: slice = slice(None)
    ) -> dict[str, Any]:
        """The microbatch with the references of its rows, if they are known. columns: of the references"""
        if self.refers and isinstance(rows, StoredRows) and rows.references is not None:
            of_rows = rows.references[list(group), columns]
            microbatch[REFERENCE] = torch.from_numpy(of_rows.reshape(-1))
        return microbatch


@dataclass(frozen=True)
class PairLayout(ReferringLayout):
    """Microbatches of pairs: chosen and rejected rows in turn."""

    height: ClassVar[int] = 2

    def referred(self, rows: Rows, chosen: Sequence[int]) -> list[dict[str, Any]]:
        return self.content(rows, chosen)

    def _width(self, rows: Rows, row: int) -> int:
        return max(rows.lengths(row))

    def _group(self, rows: Rows, group: Sequence[int]) -> dict[str, Any]:
        pieces = [[piece] for row in group for piece in rows.read(row)]
        return self._refer(self._microbatch(pieces), rows, group)


@dataclass(frozen=True)
class HeadPairs(PairLayout):
    """Microbatches of pairs for a head over rows, without labels. pad: the id of padding"""

    pad: int = 0

    def _microbatch(self, rows: Sequence[list[Piece]]) -> dict[str, Any]:
        return dict(with_mask([piece for (piece,) in rows], self.pad))


def pair_each(lengths: Numbers, capacity: int) -> Packing:
    """A row for each two pieces."""
    return Packing(np.arange(len(lengths)), np.arange(0, len(lengths) + 1, 2))


def whole_pairs(store: Store, capacity: int, overlong: str, first: int = 1) -> Pieces:
    """The pieces of pairs of which both halves have a token that counts, from their token `first` on.

    overlong: the end of a document longer than `capacity` is left out (truncate), or the pair is (drop)
    """
    lengths = np.asarray(store.lengths)
    starts, cut = np.cumsum(lengths) - lengths, np.minimum(lengths, capacity)
    kept = np.ones(len(lengths), dtype=np.bool_) if overlong == "truncate" else lengths <= capacity
    for document in np.flatnonzero(kept).tolist():
        labels = store.read(int(starts[document]), int(cut[document]))[1]
        kept[document] = (labels[first:] != IGNORED).any()
    both = np.repeat(kept.reshape(-1, 2).all(1), 2)
    return Pieces(starts[both], cut[both])
