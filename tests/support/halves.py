"""Modules whose backward is split in halves."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from penstock.runtime.split_backward.backward import Live, hold
from penstock.runtime.split_backward.recording import deferring

ROWS, WIDTH = 5, 4


class Attention(nn.Module):
    """Three products of one activation, as queries, keys and values are."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        normed = torch.tanh(x)
        result: Tensor = self.o(self.q(normed) * self.k(normed).sigmoid() + self.v(normed).sin())
        return result


def forward(module: nn.Module, x: Tensor, split: bool = True) -> Live:
    with deferring() as tape:
        output = module(x.requires_grad_())
    return hold([x], [output], tape if split else None)


def given() -> list[Tensor]:
    return [torch.randn(ROWS, WIDTH)]
