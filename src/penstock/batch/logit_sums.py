"""Cross-entropy by three sums over the vocabulary of each token, to which each part of a vocabulary adds.

    sums      log_sum = log sum_v exp(logit_v)     at_label = logit of the label     total = sum_v logit_v
              greatest = max_v logit_v, which no loss needs: it tells whether the label is the likeliest token
    loss      log_sum - (1 - s) at_label - s / V total + z log_sum^2
    gradient  of logit v: g_log_sum exp(logit_v - log_sum) + g_at_label [v is the label] + g_total

s is the smoothing, z the z-loss, V the size of the vocabulary, and g_x the gradient of x. The parts are
blocks (head_logits.py), or the ranks of tp (penstock.parallel.tensor.sharded_logits).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Penalties(NamedTuple):
    """What a cross-entropy adds for each token.

    Args:
        smoothing: share of the target that all tokens of the vocabulary have in equal parts, 0 to 1
            (label smoothing, as in torch.nn.functional.cross_entropy).
        z: factor of the squared log-sum-exp of the logits (z-loss; PaLM, arXiv 2204.02311).
    """

    smoothing: float = 0.0
    z: float = 0.0


class Wanted(NamedTuple):
    """Which of the sums that not every loss needs are wanted."""

    total: bool = False
    greatest: bool = False


class LogitSums(NamedTuple):
    """Sums over a part of the vocabulary, or over all of it, for each token: four tensors (tokens).

    log_sum: logarithm of the sum of the logits' exponentials
    at_label: the logit of the token's label; 0 if the part lacks the label
    total: the sum of the logits; 0 where no label smoothing needs it
    greatest: the greatest logit, without a gradient; 0 where nobody wants it
    """

    log_sum: Tensor
    at_label: Tensor
    total: Tensor
    greatest: Tensor

    def cross_entropy(self, labels: Tensor, ignored: int, penalties: Penalties, vocabulary: int) -> Tensor:
        """The loss of the whole vocabulary, summed over the tokens whose label is not `ignored`.

        Not a number where another label is no token of the vocabulary.
        """
        loss = self.log_sum - (1 - penalties.smoothing) * self.at_label
        if penalties.smoothing:
            loss = loss - penalties.smoothing / vocabulary * self.total
        if penalties.z:
            loss = loss + penalties.z * self.log_sum.square()
        outside = (labels < 0) | (labels >= vocabulary)
        loss = torch.where(outside, torch.nan, loss)
        return torch.where(labels == ignored, 0, loss).sum()


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums of logits of `dtype`: float32 or wider."""
    return torch.promote_types(dtype, torch.float32)


def sums_of(logits: Tensor, labels: Tensor, start: int, wanted: Wanted) -> LogitSums:
    """The sums of logits (tokens, part), in `wide` precision.

    Args:
        labels: in the whole vocabulary (tokens).
        start: token of the first column.
        wanted: the sums besides the first two.
    """
    logits = logits.to(wide(logits.dtype))
    inside, column = _columns(labels, start, logits.shape[1])
    at_label = torch.where(inside, logits.gather(1, column[:, None])[:, 0], 0)
    log_sum = logits.logsumexp(-1)
    total = logits.sum(-1) if wanted.total else torch.zeros_like(log_sum)
    greatest = logits.detach().amax(-1) if wanted.greatest else torch.zeros_like(log_sum)
    return LogitSums(log_sum, at_label, total, greatest)


def gradient_of(
    logits: Tensor, labels: Tensor, start: int, log_sum: Tensor, gradients: LogitSums, wanted: Wanted
) -> Tensor:
    """The gradient of logits (tokens, part), in their dtype.

    Args:
        labels, start, wanted: as for `sums_of`.
        log_sum: the result of which `gradients` has the gradient.
        gradients: those of the sums.
    """
    finite = log_sum.clamp(min=torch.finfo(log_sum.dtype).min)  # all logits of a part may be -inf
    gradient = (logits.to(log_sum.dtype) - finite[:, None]).exp_().mul_(gradients.log_sum[:, None])
    inside, column = _columns(labels, start, logits.shape[1])
    gradient.scatter_add_(1, column[:, None], torch.where(inside, gradients.at_label, 0)[:, None])
    if wanted.total:
        gradient.add_(gradients.total[:, None])
    return gradient.to(logits.dtype)


def _columns(labels: Tensor, start: int, count: int) -> tuple[Tensor, Tensor]:
    """Which labels are among `count` tokens from `start` on, and the column of each; 0 for the others."""
    inside = (labels >= start) & (labels < start + count)
    return inside, torch.where(inside, labels - start, 0)


def part_sums(logits: Tensor, labels: Tensor, start: int, wanted: Wanted) -> LogitSums:
    """`sums_of` whose graph saves the logits in their own dtype, and nothing else of their size."""
    return LogitSums(*_PartSums.apply(logits, labels, start, wanted))  # type: ignore[no-untyped-call]


class _PartSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, start: int, wanted: Wanted) -> tuple[Tensor, ...]:
        sums = sums_of(logits, labels, start, wanted)
        ctx.save_for_backward(logits, labels, sums.log_sum)
        ctx.mark_non_differentiable(sums.greatest)
        ctx.start, ctx.wanted = start, wanted
        return tuple(sums)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels, log_sum = ctx.saved_tensors
        gradient = gradient_of(logits, labels, ctx.start, log_sum, LogitSums(*gradients), ctx.wanted)
        return gradient, None, None, None
