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
        shape = len(pieces), max(len(piece.ids) for piece in pieces)
        ids, labels, mask = np.full(shape, self.pad), np.full(shape, IGNORED), np.zeros(shape, np.int64)
        for at, piece in enumerate(pieces):
            count = len(piece.ids)
            ids[at, :count], labels[at, :count], mask[at, :count] = piece.ids, piece.labels, 1
        return {
            "input_ids": torch.from_numpy(ids),
            "attention_mask": torch.from_numpy(mask),
            "labels": torch.from_numpy(labels) if self.problem is None else self._row_labels(pieces),
        }

    def _row_labels(self, pieces: Sequence[Piece]) -> Tensor:
        labels = torch.tensor([piece.row_label for piece in pieces], dtype=torch.float64)
        if self.problem == "single_label_classification":
            return labels[:, 0].long()
        one = self.problem == "regression" and labels.shape[1] == 1
        return (labels[:, 0] if one else labels).float()
