"""A few numbers for each tensor, by which two models are compared without both in memory.

A digest is the tensor's norm and its projections on 16 random directions. The directions follow from the
parameter's name and shape, so the digests of the split and of the reference model are comparable, and the
distance of two digests estimates the norm of the tensors' difference.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from math import sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.pipeline.compare import (
    ParameterPlace,
    Report,
    compared_gradient,
    compared_weight,
)
from penstock.runtime.sharded_weights import full_tensor
from penstock.train.check.rounding import ROUNDS

_PROJECTIONS = 16  # so that none of hundreds of distances is off by a factor of two
_AT_ONCE = 1 << 22  # entries that are converted to double precision at once
_LARGEST_SHARE = 0.5  # of a gradient that may be rounding: a missing or another one is always detected
_DIGITS = 1e-9  # equal weights have equal digests up to the order of summation

Digest = Sequence[float]  # the norm, then the projections; a list after a trip through JSON


class Digests(NamedTuple):
    """The digests of one parameter and of its gradient; None without a gradient."""

    weight: Digest
    gradient: Digest | None


def digests_of(name: str, parameter: nn.Parameter) -> Digests:
    """Digests of a parameter and its gradient. Collective where the parameter is sharded.

    Args:
        name: the parameter's name in the whole model, which determines the directions
    """
    gradient = None if parameter.grad is None else digest(name, full_tensor(parameter.grad))
    return Digests(digest(name, full_tensor(parameter)), gradient)


@torch.no_grad()
def digest(name: str, tensor: Tensor) -> Digest:
    """The digest of a tensor of any shape.

    A direction is the outer product of two Gaussian vectors, so that a large tensor needs few random numbers.
    The root mean square of the projections of D is |D|, as with a Gaussian direction.
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
    return (float(square.sqrt()), *projected.tolist())


def distance(first: Digest, second: Digest) -> float:
    """About the norm of the difference of the two tensors: 0 for equal ones."""
    norms, *projections = zip(first, second, strict=True)
    projected = sqrt(sum((a - b) ** 2 for a, b in projections) / _PROJECTIONS)
    return max(abs(norms[0] - norms[1]), projected)


def norms(split: Digest, reference: Digest) -> tuple[float, float]:
    """About the norm of the difference, and the norm of the reference's tensor."""
    return distance(split, reference), reference[0]


def compare_digests(
    losses: tuple[float, float],
    split: Sequence[tuple[ParameterPlace, Digests]],
    reference: Mapping[str, Digests],
    tolerance: float,
    dtype: torch.dtype,
    rounding: Mapping[str, float],
) -> Report:
    """Compare the split model's digests with the reference model's. If weights differ, report only them.

    Args:
        losses: of the split and of the reference model
        split: the digests of every stage's parameters
        reference: the reference model's digests, by name
        tolerance: relative to a gradient's norm
        dtype: of the model
        rounding: how far rounding alone moves each gradient of the reference model
    """
    expected = {name: digests.weight for name, digests in reference.items()}
    weights = [
        compared_weight(at, digests.weight, expected.get(at[0]), norms, _DIGITS) for at, digests in split
    ]
    if wrong := [weight for weight in weights if weight.wrong]:
        return Report.of(None, wrong, tolerance, "norm")
    gradients = {name: digests.gradient for name, digests in reference.items()}
    least = torch.finfo(dtype).eps * max((norm for norm, *_ in filter(None, gradients.values())), default=0.0)

    def room(name: str) -> float:
        """The largest difference that counts as rounding: at most a share of the gradient's norm."""
        norm = (gradients[name] or [0.0])[0]
        return min(ROUNDS * rounding.get(name, 0.0), max(_LARGEST_SHARE * norm, ROUNDS * least))

    tensors = [
        compared_gradient(
            at, digests.gradient, gradients[at[0]], norms, tolerance, rounding=least, room=room(at[0])
        )
        for at, digests in split
    ]
    return Report.of(losses, tensors, tolerance, "norm")
