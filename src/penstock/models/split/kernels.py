"""Kernels of models without values: those that a run takes, with results of the right sizes.

Without values torch takes the attention that keeps all scores, transformers makes a mask where none is
needed, and two ops have no right form for fake tensors:

- attention for CPUs returns the width of the queries' heads, where that of the values' is right (multi-head
  latent attention: DeepSeek, Kimi, Moonlight);
- a grouped product, as of experts, takes bfloat16 alone, where a run takes float32 as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import masking_utils

from penstock.private import FLASH_ATTENTION_FOR_CPU, GROUPED_MM, TorchDispatchMode


@contextmanager
def kernels_of_runs() -> Iterator[None]:
    """Inside, forwards and backwards on fake tensors take the kernels that a run takes."""
    with _Sizes(), _Fused():  # type: ignore[no-untyped-call]
        yield


class _Fused(TorchFunctionMode):
    """Attention by a fused kernel."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
        # no fused kernel gives a gradient to a mask, such as a learned bias
        if func is not F.scaled_dot_product_attention or (mask is not None and mask.requires_grad):
            return func(*args, **kwargs)
        return _fused(*args, **kwargs)


def _fused(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = attn_mask.to(query.dtype)  # as torch does
    result: Tensor = FLASH_ATTENTION_FOR_CPU(
        query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )[0]
    return result


class _Sizes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Results of the right sizes, for ops that have no right form for fake tensors."""

    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is FLASH_ATTENTION_FOR_CPU.default:
            query, _, value = args[:3]
            if query.shape[-1] != value.shape[-1]:
                # laid out as the kernel does: heads side by side
                rows, heads, length, _ = query.shape
                result = value.new_empty(rows, length, heads, value.shape[-1]).transpose(1, 2)
                return result, query.new_empty((rows, length, heads), dtype=_WIDE).transpose(1, 2)
        elif func is GROUPED_MM.default and args[0].dtype != torch.bfloat16:
            return _grouped(*args, **kwargs)
        return func(*args, **kwargs)


_WIDE = torch.float32


def _grouped(left: Tensor, right: Tensor, offs: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """The result of torch's grouped product, by which of the factors has the groups."""
    if left.dim() == 2 and right.dim() == 2:  # groups of what is summed over
        assert offs is not None
        return left.new_empty(len(offs), left.shape[0], right.shape[1])
    return left.new_empty(*left.shape[:-1], right.shape[-1])


@contextmanager
def one_document() -> Iterator[None]:
    """Inside, transformers takes each row for one document: without values it sees no other begin."""
    usual = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = usual
