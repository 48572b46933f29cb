"""A contrastive loss of pairs: each anchor's positive against all other positives of the step.

    vectors   anchor 0 | positive 0 | anchor 1 | positive 1 | ...

    scores       positive 0   positive 1   positive 2         cosines over the temperature
    anchor 0         x                                        x: the one that belongs to the anchor
    anchor 1                      x                           loss: the mean cross-entropy of the rows
    anchor 2                                   x

InfoNCE (arXiv 1807.03748); MultipleNegativesRankingLoss of sentence-transformers with scale 1 / temperature.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.batch.row_loss import check_positive


@dataclass(frozen=True)
class Contrastive:
    """The loss of the vectors of a whole step, for `penstock.pipeline.WholeStepLoss`.

    temperature: cosines are divided by it. Raises ConfigError unless it is above 0.
    """

    temperature: float = 0.05
    rows_per_group: ClassVar[int] = 2

    def __post_init__(self) -> None:
        check_positive(self, "temperature")

    def __call__(self, vectors: Tensor) -> Tensor:
        """The mean over anchors. vectors: (rows, width), anchor and positive in turn"""
        scores = self._scores(vectors)
        return F.cross_entropy(scores, torch.arange(len(scores), device=scores.device))

    def accuracy(self, vectors: Tensor) -> float:
        """The share of anchors to which no other positive is as near as their own."""
        scores = self._scores(vectors)
        others = scores.masked_fill(
            torch.eye(len(scores), dtype=torch.bool, device=scores.device), -torch.inf
        )
        return float((scores.diagonal() > others.amax(1)).double().mean())

    def _scores(self, vectors: Tensor) -> Tensor:
        vectors = F.normalize(vectors, dim=1)
        return vectors[::2] @ vectors[1::2].T / self.temperature
