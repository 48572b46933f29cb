"""Digests of tensors: a few numbers each, by which a difference is measured as well as known to be there."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from math import sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.equivalence import Place
from penstock.runtime.spread import whole

_PROJECTIONS = 16  # so that of hundreds of tensors none is measured at a half, or at twice as much
_AT_ONCE = 1 << 22  # entries that are looked at in double precision


class Digest(NamedTuple):
    """Of a tensor: its norm, and the projections on random directions that its name and shape tell."""

    norm: float
    projections: tuple[float, ...]

    def distance(self, other: Digest) -> float:
        """About the norm of the difference of the two tensors: 0 for equal ones."""
        pairs = zip(self.projections, other.projections, strict=True)
        projected = sqrt(sum((a - b) ** 2 for a, b in pairs) / _PROJECTIONS)
        return max(abs(self.norm - other.norm), projected)


class Digests(NamedTuple):
    """Of one parameter. gradient: None where it has none"""

    weight: Digest
    gradient: Digest | None


def digests_of(name: str, parameter: nn.Parameter) -> Digests:
    """name: the whole model's, as it tells the directions. Collective where the parameter is spread."""
    gradient = parameter.grad
    return Digests(
        digest(name, whole(parameter)), None if gradient is None else digest(name, whole(gradient))
    )


@torch.no_grad()
def digest(name: str, tensor: Tensor) -> Digest:
    """A direction is the outer product of two vectors, so that a large tensor needs few random numbers.

    So of a difference D each projection has the root mean square |D|, as one on a Gaussian direction has.
    """
    matrix = tensor.detach().reshape(-1, tensor.shape[-1] if tensor.dim() else 1)
    rows, columns = matrix.shape
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    options: dict[str, Any] = {"generator": generator, "dtype": torch.float64}
    left = torch.randn(_PROJECTIONS, rows, **options).to(matrix.device)
    right = torch.randn(columns, _PROJECTIONS, **options).to(matrix.device)
    projected = torch.zeros(_PROJECTIONS, dtype=torch.float64, device=matrix.device)
    square = projected.new_zeros(())
    step = max(1, _AT_ONCE // max(columns, 1))
    for start in range(0, rows, step):
        part = matrix[start : start + step].double()
        square += part.square().sum()
        projected += (left[:, start : start + step] * (part @ right).T).sum(1)
    return Digest(float(square.sqrt()), tuple(projected.tolist()))


def received(everyone: Sequence[Any]) -> Iterator[tuple[Place, Digests]]:
    """What all processes told of their stages, back from JSON."""
    for part in everyone:
        for (name, stage, rank), (weight, gradient) in part:
            of_gradient = None if gradient is None else Digest(*gradient)
            yield (name, stage, rank), Digests(Digest(*weight), of_gradient)
