"""A chain of one's own that is no transformers model, and what trains it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from penstock import StageInfo

WIDTH, LAYERS = 6, 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        inner: Tensor = self.down(torch.tanh(self.up(hidden)))
        return hidden + inner


class Chain(nn.Module):
    """One module called after the other, as most models are."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.embed = nn.Linear(3, WIDTH)
        self.layers = nn.ModuleList([Layer() for _ in range(layers)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        result: Tensor = self.head(self.norm(x))
        return result


class Piece(nn.Module):
    """One stage of a model whose provider makes each from its number."""

    def __init__(self, info: StageInfo) -> None:
        super().__init__()
        torch.manual_seed(info.stage)
        self.inwards = nn.Linear(3, WIDTH) if info.is_first else nn.Identity()
        self.layer = Layer()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(self.inwards(x))
        return result


class OptionalParts(nn.Module):
    """As torchtitan writes its models: what a stage does not hold is None, or not in the dict of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed: nn.Module | None = nn.Linear(3, WIDTH)
        self.shift: nn.Parameter | None = nn.Parameter(torch.randn(WIDTH))
        self.layers = nn.ModuleDict({str(i): Layer() for i in range(LAYERS)})
        self.norm: nn.Module | None = nn.LayerNorm(WIDTH)
        self.head: nn.Module | None = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embed is None else self.embed(x)
        x = x if self.shift is None else x + self.shift
        for layer in self.layers.values():
            x = layer(x)
        x = x if self.norm is None else self.norm(x)
        return x if self.head is None else self.head(x)


def made(kind: type[nn.Module] = Chain, dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    torch.manual_seed(1)
    return kind(**options).to(dtype)


def x_batch(rows: int = 8, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return {"x": torch.randn(rows, 3, generator=generator, dtype=dtype)}


def squares(output: Tensor, microbatch: Any) -> Tensor:
    return output.square().sum(-1).mean()
