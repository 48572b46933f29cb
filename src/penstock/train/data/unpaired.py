"""Rows of single completions, and those of the KL term: each prompt with its neighbour's completion.

    first epoch      step 1: rows 5 2 7     step 2: rows 0 3 6     ...
    neighbours       of 5 is 7, of 2 is 5, of 7 is 2; of 0 is 6, of 3 is 0, ...

A row keeps its neighbour for the whole run, as in TRL, so the reference model reads both rows once. In the
first epoch the completions of a step's KL term are thus those of the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from penstock.batch.kto import DESIRABLE, completion
from penstock.batch.loss import IGNORED
from penstock.train.data.pairs import ReferringLayout
from penstock.train.data.rows import Piece, Rows, StoredRows


@dataclass(frozen=True)
class UnpairedLayout(ReferringLayout):
    """Microbatches of completions, with `desirable`, booleans (rows,)."""

    def linked(self, rows: StoredRows, steps: Iterable[Sequence[int]] = ()) -> StoredRows:
        """The rows with their neighbours, for the KL term."""
        return replace(rows, neighbours=neighbours(len(rows), steps))

    def beside(self, rows: Rows, chosen: Sequence[int]) -> list[dict[str, Any]]:
        """The rows of the KL term."""
        groups, second = self.groups(rows, chosen, sum(self.calls)), slice(1, 2)
        return [
            self._refer(
                self._microbatch([[self._mismatched(rows, row)] for row in group]), rows, group, second
            )
            for group in groups
        ]

    def referred(self, rows: Rows, chosen: Sequence[int]) -> list[dict[str, Any]]:
        """A row, and that of its KL term, in turn."""
        groups = self.groups(rows, chosen, sum(self.calls))
        return [
            self._microbatch(
                [[piece] for row in group for piece in (*rows.read(row), self._mismatched(rows, row))]
            )
            for group in groups
        ]

    def _group(self, rows: Rows, group: Sequence[int]) -> dict[str, Any]:
        pieces = [rows.read(row) for row in group]
        desirable = torch.tensor([piece.row_label == (1.0,) for (piece,) in pieces])
        microbatch = {**self._microbatch(pieces), DESIRABLE: desirable}
        return self._refer(microbatch, rows, group, slice(0, 1))

    def _mismatched(self, rows: Rows, row: int) -> Piece:
        """The row's prompt with its neighbour's whole completion, cut once, as all rows are."""
        assert isinstance(rows, StoredRows)
        assert rows.neighbours is not None
        (own,), other = rows.read(row), rows.document(int(rows.neighbours[row]))
        first, said = (completion(torch.from_numpy(piece.labels)) for piece in (own, other))
        assert first is not None  # rows without a label that counts are left out of the data
        assert said is not None
        prompt, answer = own.ids[: first.start], other.ids[said]
        labels = np.concatenate([np.full_like(prompt, IGNORED), answer])
        whole = Piece(np.concatenate([prompt, answer]), labels)
        return whole.part(0, self.longest or len(labels))


def neighbours(count: int, steps: Iterable[Sequence[int]] = ()) -> npt.NDArray[np.int64]:
    """By row, of `count`, the row before it in its first step; that of a step's first row is its last one.

    A row is no neighbour of its own, also where a step has it twice, as the end of one epoch and the start of
    the next.

    steps: the rows of each step. For a row of none of them, it is the row before it in the data.
    """
    made, seen = np.roll(np.arange(count), 1), np.zeros(count, dtype=np.bool_)
    for rows in steps:
        for at, row in enumerate(rows):
            before = (rows[at - back] for back in range(1, len(rows)))
            other = next((other for other in before if other != row), None)
            if other is not None and not seen[row]:
                made[row], seen[row] = other, True
    return made
