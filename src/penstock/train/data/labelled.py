"""Batches for a model's own head: a label for each row, or one for each of its tokens.

    input_ids         7 8 9 4      attention_mask   1 1 1 1      labels   2      of rows
                      5 6 _ _                       1 1 0 0               0

Padding has the model's own id: a head over rows of a causal model looks for the last token before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.batch.loss import IGNORED, ProblemType
from penstock.train.data.rows import DocumentLayout, Piece


@dataclass(frozen=True)
class LabelledLayout(DocumentLayout):
    """Microbatches of rows of one document each.

    pad: the id of padding
    problem: what the label of a row is; None where each token has one
    """

    pad: int = 0
    problem: ProblemType | None = None

    @property
    def ignores(self) -> bool:
        return self.problem in (None, "single_label_classification")

    def _microbatch(self, rows: Sequence[list[Piece]]) -> dict[str, Any]:
        """input_ids, attention_mask and labels of tokens (rows, sequence), int64.

        Labels of rows: int64 (rows,) classes, float32 (rows,) numbers, or float32 (rows, numbers).
        """
        pieces = [piece for (piece,) in rows]
        of_tokens = self.problem is None
        labels = (
            stacked([piece.labels for piece in pieces], IGNORED) if of_tokens else self._row_labels(pieces)
        )
        return {**with_mask(pieces, self.pad), "labels": labels}

    def _row_labels(self, pieces: Sequence[Piece]) -> Tensor:
        labels = torch.tensor([piece.row_label for piece in pieces], dtype=torch.float64)
        if self.problem == "single_label_classification":
            return labels[:, 0].long()
        one = self.problem == "regression" and labels.shape[1] == 1
        return (labels[:, 0] if one else labels).float()


def with_mask(pieces: Sequence[Piece], pad: int) -> dict[str, Tensor]:
    """input_ids and attention_mask of rows of one document each, int64 (rows, sequence). pad: the id"""
    mask = stacked([np.ones_like(piece.ids) for piece in pieces], 0)
    return {"input_ids": stacked([piece.ids for piece in pieces], pad), "attention_mask": mask}


def stacked(rows: Sequence[npt.NDArray[np.int64]], pad: int) -> Tensor:
    """The rows as one tensor (rows, sequence), each padded at its end to the longest."""
    made = np.full((len(rows), max(map(len, rows))), pad)
    for at, row in enumerate(rows):
        made[at, : len(row)] = row
    return torch.from_numpy(made)
