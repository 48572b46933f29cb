"""Whether what a module does between its projections treats each of their outputs by itself.

Where ranks share the outputs out, anything else (a mean over them, halves of a fused projection) would be
something different on each rank, of the right shape, and nothing would tell. It is found out by running the
module's own forward on a few numbers in the place of the projections, as a whole and rank by rank.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn

_WIDTH = 4  # outputs a rank


class _Given(nn.Module):
    """In the place of a projection that ranks share out by its outputs."""

    value: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return self.value


class _Seen(nn.Module):
    """In the place of one that ranks share out by its inputs."""

    value: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.value = x
        return x


def mixes(module: nn.Module, columns: list[str], rows: list[str], ranks: int) -> bool:
    """Whether `module` mixes the outputs of its projections `columns` before they enter `rows`.

    Only where it takes a single argument and has no weights of its own beside them, as an MLP; else False.
    """
    taken = inspect.signature(module.forward).parameters.values()
    needed = [p for p in taken if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    if len(needed) != 1 or len(rows) != 1:
        return False
    memo: dict[int, Any] = {id(module.get_submodule(name)): _Given() for name in columns}
    memo |= {id(module.get_submodule(name)): _Seen() for name in rows}
    memo |= {id(tensor): tensor for part in module.modules() for tensor in part._parameters.values()}
    twin = copy.deepcopy(module, memo)
    if next(twin.parameters(), None) is not None or any(b.is_meta for b in twin.buffers()):
        return False
    generator = torch.Generator().manual_seed(0)
    values = {n: torch.randn(2, 3, ranks * _WIDTH, generator=generator, device="cpu") for n in columns}
    whole = _run(twin, values, rows[0])
    pieces = [
        _run(twin, {n: value.chunk(ranks, -1)[rank] for n, value in values.items()}, rows[0])
        for rank in range(ranks)
    ]
    if whole is None or any(piece is None for piece in pieces):
        return False
    together = torch.cat([piece for piece in pieces if piece is not None], dim=-1)
    return together.shape != whole.shape or not torch.allclose(together, whole)


@torch.no_grad()
def _run(twin: nn.Module, values: dict[str, Tensor], seen: str) -> Tensor | None:
    """What enters `seen`; None where the forward needs more than its projections."""
    for name, value in values.items():
        vars(twin.get_submodule(name))["value"] = value
    where = vars(twin.get_submodule(seen))
    where["value"] = None
    try:
        twin(torch.zeros(2, 3, 1, device="cpu"))
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
        return None
    result: Tensor | None = where["value"]
    return result
