"""A few numbers for each tensor, by which two models are compared without holding both.

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

from penstock.pipeline.compare import Compared, ParameterPlace, Report, allowed, only_one
from penstock.runtime.sharded_weights import full_tensor
from penstock.train.check.rounding import ROUNDS

_PROJECTIONS = 16  # so that none of hundreds of distances is off by a factor of two
_AT_ONCE = 1 << 22  # entries that are converted to double precision at once
_LARGEST_SHARE = 0.5  # of a gradient that may be rounding: a missing or a different one is always found
_DIGITS = 1e-9  # equal weights have equal digests except for the order of summation

Digest = Sequence[float]  # the norm, then the projections; a list after a trip through JSON


class Digests(NamedTuple):
    """The digests of one parameter and of its gradient, None where it has none."""

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


def compare_digests(
    losses: tuple[float, float],
    split: Sequence[tuple[ParameterPlace, Digests]],
    reference: Mapping[str, Digests],
    tolerance: float,
    dtype: torch.dtype,
    rounding: Mapping[str, float],
) -> Report:
    """Compare the split model's digests with the reference model's. Where weights differ, report only them.

    Args:
        losses: of the split and of the reference model
        split: the digests of every stage's parameters
        reference: the reference model's digests, by name
        tolerance: relative to a gradient's norm
        dtype: of the model
        rounding: how far rounding alone moves each gradient of the reference model
    """
    weights = [_weight(place, digests.weight, reference.get(place[0])) for place, digests in split]
    if wrong := [each for each in weights if each.wrong]:
        return Report.of(None, wrong, tolerance, "norm")
    largest = max((each.gradient[0] for each in reference.values() if each.gradient is not None), default=0.0)

    def gradient(place: ParameterPlace, actual: Digest | None, expected: Digest | None) -> Compared:
        if actual is None and expected is None:
            return Compared("gradient", *place, 0.0, 0.0, 0.0)
        if actual is None or expected is None:
            return only_one("gradient", place)
        norm = expected[0]
        limit = max(_LARGEST_SHARE * norm, ROUNDS * torch.finfo(dtype).eps * largest)
        room = min(ROUNDS * rounding.get(place[0], 0.0), limit)
        passes = max(allowed(tolerance, norm, dtype, largest), room)
        return Compared("gradient", *place, distance(actual, expected), norm, passes)

    tensors = [gradient(place, each.gradient, reference[place[0]].gradient) for place, each in split]
    return Report.of(losses, tensors, tolerance, "norm")


def _weight(place: ParameterPlace, actual: Digest, expected: Digests | None) -> Compared:
    if expected is None:
        return only_one("weight", place)
    norm = expected.weight[0]
    return Compared("weight", *place, distance(actual, expected.weight), norm, _DIGITS * norm)
