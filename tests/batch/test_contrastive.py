"""The contrastive loss of pairs, by its formula."""

from __future__ import annotations

import math

import pytest
import torch

from penstock.batch.contrastive import Contrastive
from penstock.errors import ConfigError
from support.refusals import refuses


def test_the_loss_is_the_mean_cross_entropy_of_cosines() -> None:
    vectors = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    vectors[1], vectors[5] = vectors[0], -vectors[4]  # a hit, and a miss
    rows = [(row / row.norm()).tolist() for row in vectors]
    total, right = 0.0, 0
    for at in range(3):
        scores = [
            sum(a * b for a, b in zip(rows[2 * at], rows[2 * to + 1], strict=True)) / 0.1 for to in range(3)
        ]
        total -= scores[at] - math.log(sum(math.exp(score) for score in scores))
        right += scores[at] == max(scores)
    loss = Contrastive(0.1)
    assert float(loss(vectors)) == pytest.approx(total / 3, rel=1e-12)
    assert loss.accuracy(vectors) == pytest.approx(right / 3)
    assert 0 < right < 3


def test_equal_vectors_are_no_hits_and_a_single_pair_is_one() -> None:
    assert Contrastive().accuracy(torch.ones(4, 3)) == 0
    assert Contrastive().accuracy(torch.ones(2, 3)) == 1


def test_a_temperature_of_zero_is_refused() -> None:
    with refuses(ConfigError, "temperature=0", "above 0"):
        Contrastive(0)
