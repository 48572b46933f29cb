"""The loss of a large vocabulary by Liger's fused kernel (arXiv 2410.10989), in place of our blocks.

Liger takes a few tokens at a time, and computes the gradients already in the forward:

    forward   for some tokens: logits -> loss and gradient of the logits, in place -> rows of the gradient of
              the hidden states; the sum over the tokens is the weight's gradient, in float32
    backward  both gradients times the gradient of the loss

So the head's product runs once, and head_logits.py runs it twice. In exchange a live microbatch holds the
weight's gradient from its forward to its backward.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any, Literal

import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.private import FakeTensor

Chunked = bool | Literal["liger"]  # values of the option chunked_loss


def check_liger(key: str, device: str) -> None:
    """Raise ConfigError where Liger is not installed, or cannot run on that type of device.

    key: of the config, with its value
    """
    if any(importlib.util.find_spec(name) is None for name in ("liger_kernel", "triton")):
        raise ConfigError(key, "it needs Liger, which is not installed", "pip install 'penstock[liger]'")
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        remedy = "Take chunked_loss=True. For a test of a few tokens, set TRITON_INTERPRET=1"
        raise ConfigError(f"{key} on a CPU", "Liger's kernels are Triton's, for GPUs", remedy)


def liger_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    ignored: int,
    smoothing: float,
    z: float,
) -> Tensor:
    """The cross-entropy summed over the tokens, in float32. Arguments as in head_logits.py.

    hidden: (tokens, width), of one token at least
    """
    wanted = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in (hidden, weight, bias)
    )
    if hidden.requires_grad is not wanted:  # Liger asks this tensor alone whether it has to make gradients
        hidden = hidden.detach().requires_grad_(wanted)
    if isinstance(hidden, FakeTensor):
        without_values: Tensor = _WithoutValues.apply(hidden, weight, bias)  # type: ignore[no-untyped-call]
        return without_values
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    outputs: tuple[Tensor, ...] = LigerFusedLinearCrossEntropyFunction.apply(
        hidden, weight, labels, bias, None, ignored, z, smoothing, "sum", None, False, torch.float32
    )
    return outputs[0]


class _WithoutValues(torch.autograd.Function):
    """Saves tensors of the sizes that Liger saves, to estimate memory where tensors have no values."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor | None) -> Tensor:
        kept = (inputs[0], *(tensor for tensor in inputs[1:] if tensor is not None and tensor.requires_grad))
        ctx.save_for_backward(*(torch.empty_like(tensor) for tensor in kept if tensor is not None))
        assert inputs[0] is not None
        return inputs[0].new_empty((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        gradients = iter(ctx.saved_tensors)
        return tuple(next(gradients) if needed else None for needed in ctx.needs_input_grad)
