"""Sums over parts of a vocabulary, added up, give the cross-entropy of whole logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.batch.logit_sums import LogitSums, Penalties, Wanted, part_sums

IGNORED, TOKENS, VOCABULARY = -100, 6, 9
LABELS = torch.tensor([0, 8, IGNORED, 3, 4, 8])


def logits(dtype: torch.dtype = torch.float64) -> Tensor:
    drawn = torch.randn(TOKENS, VOCABULARY, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (3 * drawn).to(dtype).requires_grad_()


def of_parts(values: Tensor, cuts: tuple[int, ...], penalties: Penalties, labels: Tensor = LABELS) -> Tensor:
    """The loss by parts of the vocabulary that end at `cuts`."""
    starts = (0, *cuts[:-1])
    parts = [
        part_sums(values[:, a:b], labels, a, Wanted(total=True)) for a, b in zip(starts, cuts, strict=True)
    ]
    log_sum, at_label, total, greatest = (torch.stack(sums) for sums in zip(*parts, strict=True))
    sums = LogitSums(log_sum.logsumexp(0), at_label.sum(0), total.sum(0), greatest.amax(0))
    return sums.cross_entropy(labels, IGNORED, penalties, VOCABULARY)


@pytest.mark.parametrize("cuts", [(9,), (3, 9), (1, 4, 9)], ids=str)
@pytest.mark.parametrize("penalties", [Penalties(), Penalties(0.1, 1e-2)], ids=str)
def test_parts_give_the_cross_entropy(cuts: tuple[int, ...], penalties: Penalties) -> None:
    mine, plain = logits(), logits()
    smoothing, z = penalties
    right = F.cross_entropy(plain, LABELS, ignore_index=IGNORED, reduction="sum", label_smoothing=smoothing)
    right = right + z * (plain.logsumexp(-1).square() * (LABELS != IGNORED)).sum()
    loss = of_parts(mine, cuts, penalties)
    torch.testing.assert_close(loss, right, rtol=1e-13, atol=0)
    gradients = [torch.autograd.grad(value, leaf)[0] for value, leaf in ((loss, mine), (right, plain))]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-14)


def test_half_precision_is_summed_in_float32() -> None:
    narrow = logits(torch.bfloat16)
    loss = of_parts(narrow, (4, 9), Penalties())
    assert loss.dtype == torch.float32
    wide = narrow.detach().double()
    right = F.cross_entropy(wide, LABELS, ignore_index=IGNORED, reduction="sum")
    assert float(loss.detach()) == pytest.approx(float(right), rel=1e-6)
    (gradient,) = torch.autograd.grad(loss, narrow)
    assert gradient.dtype == torch.bfloat16


def test_a_part_may_be_masked_whole() -> None:
    """As the rows that pad a vocabulary: such a part's own sum of exponentials is zero."""
    masked = torch.where(torch.arange(VOCABULARY) < 5, logits().detach(), -torch.inf)
    labels = torch.where(LABELS == IGNORED, IGNORED, LABELS % 5)
    mine, plain = (masked.clone().requires_grad_() for _ in range(2))
    loss, right = (
        of_parts(mine, (5, 9), Penalties(), labels),
        F.cross_entropy(plain, labels, ignore_index=IGNORED, reduction="sum"),
    )
    results = [(value, *torch.autograd.grad(value, leaf)) for value, leaf in ((loss, mine), (right, plain))]
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("wrong", [-1, VOCABULARY])
def test_a_label_outside_of_the_vocabulary_gives_no_number(wrong: int) -> None:
    labels = LABELS.clone()
    labels[0] = wrong
    assert of_parts(logits(), (4, 9), Penalties(), labels).isnan()
