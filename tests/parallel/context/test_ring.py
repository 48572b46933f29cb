"""Which attention functions the ring stands for; test_attention.py has its gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.errors import ModelError
from penstock.parallel.context.ring import AttentionCall, compare
from support.refusals import refuses


def call(softcap: float | None = None) -> AttentionCall:
    unused: Any = None  # nothing is sent
    return AttentionCall(unused, unused, 0.5, softcap, False)


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *,
    dropout: float, scale: float = 0.5, cap: float = 0.0,
) -> tuple[Tensor, None]:  # fmt: skip
    times = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    scores = query @ key.mT * scale
    if cap:
        scores = cap * torch.tanh(scores / cap)
    return ((scores + mask).softmax(-1) @ value).transpose(1, 2), None


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    return torch.zeros(1, 4, 3, 8), torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8)


def test_softmax_attention_with_its_scaling_and_softcap_is_what_the_ring_does() -> None:
    compare(attention, nn.Identity(), *tensors(), call(), {})
    compare(attention, nn.Identity(), *tensors(), call(softcap=0.3), {"cap": 0.3})


@pytest.mark.parametrize("options", [{"scale": 0.25}, {"cap": 0.3}])
def test_another_attention_is_refused(options: dict[str, float]) -> None:
    with refuses(ModelError, "the attention of Identity", remedy="Use ulysses"):
        compare(attention, nn.Identity(), *tensors(), call(), options)
