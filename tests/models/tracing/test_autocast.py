"""Autocast for forwards without values: products are in the lower dtype, and each weight is cast once."""

from __future__ import annotations

import torch
from torch import nn

from penstock.models.tracing.autocast import AutocastWithoutValues


def test_products_on_the_meta_device_are_in_the_lower_dtype() -> None:
    layer, x = nn.Linear(4, 4, device="meta"), torch.empty(2, 4, device="meta")
    with AutocastWithoutValues(torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
        assert (x @ x.t()).dtype == torch.bfloat16
        assert (x + x).dtype == torch.float32  # no product
        assert torch.mm(x.double(), x.double().t()).dtype == torch.float64  # autocast leaves it, too


def test_a_weight_is_cast_once_for_all_microbatches() -> None:
    layer, x = nn.Linear(4, 4, bias=False, device="meta"), torch.empty(2, 4, device="meta")
    with AutocastWithoutValues(torch.bfloat16) as mode:
        for _ in range(3):
            layer(x)
    assert len(mode.casts) == 1
