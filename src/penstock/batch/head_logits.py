"""Cross-entropy over a large vocabulary, without all of its logits in memory.

The logits of a microbatch, with their copy in float32 and their gradient, are often the largest tensors of a
step. `HeadLogits` is the deferred result of a linear head. Its cross-entropy runs the head on a block of the
vocabulary at a time, forwards and backwards, and holds one block:

    forward   for each block: logits -> log-sum-exp over the blocks, and the logit of each token's label
    backward  for each block: logits again -> their gradient -> rows of the weight's gradient, whole;
              the sum over the blocks is the gradient of the hidden states

Blocks of the vocabulary and not of the tokens: each row of the weight's gradient is then one product over all
tokens, as in a plain backward, and the weight is read once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.batch.deferred_logits import DeferredLogits, LogitsStep
from penstock.batch.hits import Hits
from penstock.batch.liger import liger_cross_entropy
from penstock.batch.logit_sums import LogitSums, Penalties, Wanted, gradient_of, sums_of, wide

HELD_BYTES = 1 << 28  # logits of a microbatch in float32; those with more are never whole


class HeadLogits(DeferredLogits):
    """Deferred ``F.linear(hidden, weight, bias)``, with `steps` to apply to it in order.

    Args:
        hidden: the head's input (rows, sequence, width).
        weight: the head's (vocabulary, width), in the dtype of `hidden`.
        dtype: that of the result.
        by_liger: whether Liger's kernel computes the loss, if there are no steps.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    steps: tuple[LogitsStep, ...]
    by_liger: bool

    @staticmethod
    def __new__(
        cls,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        steps: tuple[LogitsStep, ...] = (),
        dtype: torch.dtype | None = None,
        by_liger: bool = False,
    ) -> HeadLogits:
        trains = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
        made = cls._made((*hidden.shape[:-1], len(weight)), dtype or hidden.dtype, hidden.device, trains)
        made.hidden, made.weight, made.bias, made.steps = hidden, weight, bias, steps
        made.by_liger = by_liger
        return made

    def stepped(self, step: LogitsStep) -> HeadLogits:
        dtype = step(torch.empty(0, dtype=self.dtype)).dtype
        return self._with(self.hidden, (*self.steps, step), dtype)

    def sliced(self, index: Any) -> HeadLogits:
        return self._with(self.hidden[index], self.steps, self.dtype)

    def _with(self, hidden: Tensor, steps: tuple[LogitsStep, ...], dtype: torch.dtype) -> HeadLogits:
        return HeadLogits(hidden, self.weight, self.bias, steps, dtype, self.by_liger)

    def _computed(self) -> Tensor:
        return _stepped(self.steps, F.linear(self.hidden, self.weight, self.bias))

    def cross_entropy(self, labels: Tensor, ignored: int, penalties: Penalties, hits: Hits) -> Tensor:
        labels, hidden = labels.reshape(-1), self.hidden.reshape(-1, self.hidden.shape[-1])
        if self.by_liger and self.requires_grad and not self.steps and len(hidden):
            hits.miss()  # the kernel shows no logits
            return liger_cross_entropy(hidden, self.weight, self.bias, labels, ignored, *penalties)
        sums = self.sums(labels, 0, Wanted(bool(penalties.smoothing), hits.wanted))
        hits.add(sums.at_label, sums.greatest, labels, ignored)
        return sums.cross_entropy(labels, ignored, penalties, len(self.weight))

    def sums(self, labels: Tensor, start: int, wanted: Wanted) -> LogitSums:
        """The sums over this head's tokens, which are all or a part of the vocabulary, block by block.

        Arguments as for `sums_of` (logit_sums.py).
        """
        hidden = self.hidden.reshape(-1, self.hidden.shape[-1])
        inputs = hidden, self.weight, self.bias, labels, self.steps, start, wanted
        return LogitSums(*_HeadSums.apply(*inputs))  # type: ignore[no-untyped-call]


def are_large(tokens: int, vocabulary: int) -> bool:
    """Whether logits of that size, in float32, take more than HELD_BYTES."""
    return 4 * tokens * vocabulary > HELD_BYTES


def _stepped(steps: Sequence[LogitsStep], logits: Tensor) -> Tensor:
    for step in steps:
        logits = step(logits)
    return logits


class _HeadSums(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        steps: tuple[LogitsStep, ...],
        start: int,
        wanted: Wanted,
    ) -> tuple[Tensor, ...]:
        log_sum = hidden.new_full((len(hidden),), -torch.inf, dtype=wide(hidden.dtype))
        greatest = log_sum
        at_label, total = torch.zeros_like(log_sum), torch.zeros_like(log_sum)
        for block in _blocks(len(hidden), len(weight)):
            logits = _stepped(steps, _linear(hidden, weight, bias, block))
            sums = sums_of(logits, labels, start + block.start, wanted)
            log_sum = torch.logaddexp(log_sum, sums.log_sum)
            at_label += sums.at_label
            total += sums.total
            greatest = torch.maximum(greatest, sums.greatest)
        ctx.save_for_backward(hidden, weight, bias, labels, log_sum)
        ctx.mark_non_differentiable(greatest)
        ctx.steps, ctx.start, ctx.wanted = steps, start, wanted
        return log_sum, at_label, total, greatest

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, log_sum = ctx.saved_tensors
        of_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        of_bias = torch.empty_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        of_hidden = torch.zeros_like(hidden, dtype=log_sum.dtype)
        for block in _blocks(len(hidden), len(weight)):
            raw = _linear(hidden, weight, bias, block)
            gradient = _gradient(ctx, raw, block, labels, log_sum, LogitSums(*gradients))
            of_hidden += gradient @ weight[block]
            if of_weight is not None:
                torch.mm(gradient.t(), hidden, out=of_weight[block])
            if of_bias is not None:
                torch.sum(gradient, 0, out=of_bias[block])
        return of_hidden.to(hidden.dtype), of_weight, of_bias, None, None, None, None


def _gradient(
    ctx: Any, raw: Tensor, block: slice, labels: Tensor, log_sum: Tensor, gradients: LogitSums
) -> Tensor:
    """The gradient of the head's logits `raw` for one block of the vocabulary (tokens, block)."""
    raw = raw.requires_grad_(bool(ctx.steps))
    with torch.enable_grad():
        logits = _stepped(ctx.steps, raw)
    start = ctx.start + block.start
    gradient = gradient_of(logits.detach(), labels, start, log_sum, gradients, ctx.wanted)
    if not ctx.steps:
        return gradient
    (raw_gradient,) = torch.autograd.grad(logits, raw, gradient)
    return raw_gradient


def _linear(hidden: Tensor, weight: Tensor, bias: Tensor | None, block: slice) -> Tensor:
    return F.linear(hidden, weight[block], None if bias is None else bias[block])


def _blocks(tokens: int, vocabulary: int) -> Iterator[slice]:
    """Blocks of the vocabulary of one size, each with at most HELD_BYTES of logits in float32."""
    count = -(-4 * tokens * vocabulary // HELD_BYTES)
    size = -(-vocabulary // max(count, 1))
    for start in range(0, vocabulary, size):
        yield slice(start, min(start + size, vocabulary))
