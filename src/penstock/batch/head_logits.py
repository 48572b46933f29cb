"""Cross-entropy over a large vocabulary, without all of its logits in memory.

A row of logits is as long as the vocabulary, so that the logits of a microbatch, with their copy in float32
and their gradient, are often the largest tensors of a step. `HeadLogits` is the deferred result of a
linear head. `cross_entropy` runs the head on a block of the vocabulary at a time, forwards and
backwards, and holds one block:

    forward   for each block: logits -> log-sum-exp over the blocks, and the logit of each token's label
    backward  for each block: logits again -> their gradient -> rows of the weight's gradient, whole;
              the sum over the blocks is the gradient of the hidden states

Blocks of the vocabulary and not of the tokens: each row of the weight's gradient is then one product over all
tokens, as in a plain backward, and the weight is read once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.batch.liger import liger_cross_entropy
from penstock.errors import ModelError
from penstock.private import DisableTorchFunctionSubclass, make_wrapper_subclass, tree_map_only

HELD_BYTES = 1 << 28  # logits of a microbatch in float32; those with more are never whole

LogitsStep = Callable[[Tensor], Tensor]  # arithmetic on logits, entry by entry


class HeadLogits(Tensor):
    """Deferred ``F.linear(hidden, weight, bias)``, with `steps` to apply to it in order.

    Arithmetic with numbers, casts and slices of rows and tokens give another HeadLogits. Any other use, such
    as a user's hook that reads values, runs the head and continues with a plain tensor.

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
    _whole: Tensor | None

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
        made = make_wrapper_subclass(
            cls, (*hidden.shape[:-1], len(weight)), dtype=dtype or hidden.dtype, device=hidden.device,
            requires_grad=hidden.requires_grad or weight.requires_grad,
        )  # fmt: skip
        made.hidden, made.weight, made.bias, made.steps = hidden, weight, bias, steps
        made.by_liger, made._whole = by_liger, None
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with DisableTorchFunctionSubclass():
            if func in _FACTS or getattr(func, "__self__", None) in _FACTS:
                return func(*args, **kwargs)
            first = args[0] if args else None
            if isinstance(first, HeadLogits) and first._whole is None:
                later = first._later(func, args[1:], kwargs)
                if later is not None:
                    return later
            plain = tree_map_only(HeadLogits, lambda logits: logits.whole(), (args, dict(kwargs)))
            return func(*plain[0], **plain[1])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # below autograd, where gradients would be lost
        raise ModelError(
            f"logits that chunked_loss has not computed, read by {func}",
            "a forward or a hook reads them below autograd, where penstock cannot compute them",
            "Set chunked_loss=False",
        )

    def _later(self, func: Any, others: Sequence[Any], options: Mapping[str, Any]) -> HeadLogits | None:
        """The deferred result of a call; None for a function that needs the values."""
        if func is Tensor.__getitem__:
            index = others[0] if isinstance(others[0], tuple) else others[:1]
            # slices that leave the vocabulary, the last dimension, as it is
            if len(index) < self.hidden.dim() and all(isinstance(entry, slice) for entry in index):
                return self._with(self.hidden[others[0]], self.steps, self.dtype)
        numbers = all(isinstance(other, int | float | torch.dtype) for other in (*others, *options.values()))
        if func not in _BY_ENTRY or not numbers:
            return None

        def step(logits: Tensor) -> Tensor:
            return func(logits, *others, **options)  # type: ignore[no-any-return]

        dtype = step(torch.empty(0, dtype=self.dtype)).dtype
        return self._with(self.hidden, (*self.steps, step), dtype)

    def _with(self, hidden: Tensor, steps: tuple[LogitsStep, ...], dtype: torch.dtype) -> HeadLogits:
        return HeadLogits(hidden, self.weight, self.bias, steps, dtype, self.by_liger)

    @property
    def is_computed(self) -> bool:
        """Whether something has read the values, and may have changed them in place."""
        return self._whole is not None

    def whole(self) -> Tensor:
        """The logits, computed once."""
        if self._whole is None:
            with DisableTorchFunctionSubclass():
                self._whole = _stepped(self.steps, F.linear(self.hidden, self.weight, self.bias))
        return self._whole

    def __repr__(self) -> str:  # type: ignore[override]
        return f"HeadLogits(shape={tuple(self.shape)}, dtype={self.dtype})"


_FACTS = {
    *(getattr(Tensor, name) for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad")),
    *(getattr(Tensor, name) for name in ("is_cuda", "is_meta", "is_leaf", "is_sparse", "is_nested")),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.get_device, Tensor.is_floating_point),
    *(Tensor.is_complex, Tensor.__len__, Tensor.__hash__, Tensor.__repr__),
}
_ARITHMETIC = ("mul", "div", "tanh", "add", "sub", "neg")
_BY_ENTRY = {
    *(getattr(kind, name) for kind in (torch, Tensor) for name in _ARITHMETIC),
    *(Tensor.__mul__, Tensor.__rmul__, Tensor.__truediv__, Tensor.__add__, Tensor.__radd__, Tensor.__sub__),
    *(Tensor.__neg__, Tensor.float, Tensor.to, Tensor.contiguous),
}


def are_large(tokens: int, vocabulary: int) -> bool:
    """Whether logits of that size, in float32, take more than HELD_BYTES."""
    return 4 * tokens * vocabulary > HELD_BYTES


def _stepped(steps: Sequence[LogitsStep], logits: Tensor) -> Tensor:
    for step in steps:
        logits = step(logits)
    return logits


def whole(output: Any) -> Any:
    """`output` with plain tensors in place of each HeadLogits."""
    return tree_map_only(HeadLogits, HeadLogits.whole, output)


class Penalties(NamedTuple):
    """What a cross-entropy adds for each token.

    Args:
        smoothing: share of the target that all tokens of the vocabulary have in equal parts, 0 to 1
            (label smoothing, as in torch.nn.functional.cross_entropy).
        z: factor of the squared log-sum-exp of the logits (z-loss; PaLM, arXiv 2204.02311).
    """

    smoothing: float = 0.0
    z: float = 0.0


def cross_entropy(logits: HeadLogits, labels: Tensor, ignored: int, penalties: Penalties) -> Tensor:
    """The cross-entropy summed over the tokens, those with the label `ignored` left out.

    Args:
        labels: of the shape of `logits` without the vocabulary.

    Half precision is summed in float32. Backward of the backward is refused.
    """
    hidden = logits.hidden.reshape(-1, logits.hidden.shape[-1])
    inputs = hidden, logits.weight, logits.bias, labels.reshape(-1)
    if logits.by_liger and not logits.steps and len(hidden):
        return liger_cross_entropy(*inputs, ignored, *penalties)
    loss: Tensor = _CrossEntropy.apply(*inputs, logits.steps, ignored, penalties)  # type: ignore[no-untyped-call]
    return loss


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        steps: tuple[LogitsStep, ...],
        ignored: int,
        penalties: Penalties,
    ) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        log_sum = hidden.new_full((len(hidden),), -torch.inf, dtype=wide)
        own, total = torch.zeros_like(log_sum), torch.zeros_like(log_sum)
        for block in _blocks(len(hidden), len(weight)):
            logits = _stepped(steps, _linear(hidden, weight, bias, block)).to(wide)
            log_sum = torch.logaddexp(log_sum, logits.logsumexp(-1))
            inside, column = _place(labels, block)
            own = torch.where(inside, logits.gather(1, column[:, None])[:, 0], own)
            if penalties.smoothing:
                total += logits.sum(-1)
        ctx.save_for_backward(hidden, weight, bias, labels, log_sum)
        ctx.steps, ctx.ignored, ctx.penalties = steps, ignored, penalties
        loss = log_sum - (1 - penalties.smoothing) * own - penalties.smoothing / len(weight) * total
        loss += penalties.z * log_sum.square()
        return torch.where(labels == ignored, 0, loss).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, seed: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, log_sum = ctx.saved_tensors
        of_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        of_bias = torch.empty_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        of_hidden = torch.zeros_like(hidden, dtype=log_sum.dtype)
        seeds = torch.where(labels == ctx.ignored, 0, seed.to(log_sum.dtype))
        for block in _blocks(len(hidden), len(weight)):
            gradient = _gradient(ctx, block, hidden, weight, bias, labels, log_sum, seeds)
            of_hidden += gradient @ weight[block]
            if of_weight is not None:
                torch.mm(gradient.t(), hidden, out=of_weight[block])
            if of_bias is not None:
                torch.sum(gradient, 0, out=of_bias[block])
        return of_hidden.to(hidden.dtype), of_weight, of_bias, None, None, None, None


def _gradient(
    ctx: Any,
    block: slice,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    log_sum: Tensor,
    seeds: Tensor,
) -> Tensor:
    """The gradient of the head's logits for one block of the vocabulary (tokens, block)."""
    smoothing, z = ctx.penalties
    raw = _linear(hidden, weight, bias, block).requires_grad_(bool(ctx.steps))
    with torch.enable_grad():
        logits = _stepped(ctx.steps, raw)
    gradient = (logits.detach().to(log_sum.dtype) - log_sum[:, None]).exp_()
    gradient.mul_((seeds * (1 + 2 * z * log_sum))[:, None])
    inside, column = _place(labels, block)
    own = torch.where(inside, (smoothing - 1) * seeds, 0)
    gradient.scatter_add_(1, column[:, None], own[:, None])
    if smoothing:
        gradient.sub_((smoothing / len(weight) * seeds)[:, None])
    gradient = gradient.to(logits.dtype)
    if not ctx.steps:
        return gradient
    (raw_gradient,) = torch.autograd.grad(logits, raw, gradient)
    return raw_gradient


def _linear(hidden: Tensor, weight: Tensor, bias: Tensor | None, block: slice) -> Tensor:
    return F.linear(hidden, weight[block], None if bias is None else bias[block])


def _place(labels: Tensor, block: slice) -> tuple[Tensor, Tensor]:
    """Which labels lie in the block, and the column of each; 0 for those outside."""
    inside = (labels >= block.start) & (labels < block.stop)
    return inside, torch.where(inside, labels - block.start, 0)


def _blocks(tokens: int, vocabulary: int) -> Iterator[slice]:
    """Blocks of the vocabulary of one size, each with at most HELD_BYTES of logits in float32."""
    count = -(-4 * tokens * vocabulary // HELD_BYTES)
    size = -(-vocabulary // max(count, 1))
    for start in range(0, vocabulary, size):
        yield slice(start, min(start + size, vocabulary))
