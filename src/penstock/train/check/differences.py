"""Digests of tensors: a few numbers each, by which a difference is measured as well as known to be there."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from math import sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from penstock.pipeline.compare import Place
from penstock.runtime.sharded_weights import whole

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


# ---- How far rounding alone carries a model: the same backward again, with each weight moved by its last
# digit.
#
# Where ranks of cp, ep and tp add up in another order than one process does, a right split differs from
# the whole model by such rounding, more so the deeper the model is. And a choice among scores that are
# nearly tied, a router's, may become another one, after which all differs. Neither is known beforehand,
# but both are seen here: what the last digits of the weights change is what the order of the sums may
# change.


ROUNDS = 4.0  # how often as far as it was seen to
_TOPK = (torch.topk, Tensor.topk)


@torch.no_grad()
def nudge(model: nn.Module, turn: int) -> None:
    """Move each entry of each weight by about its dtype's epsilon, up or down, in place.

    turn: from 0; another one moves them in other directions
    """
    for number, parameter in enumerate(model.parameters()):
        if parameter.is_floating_point():
            generator = torch.Generator(parameter.device).manual_seed(turn * 10**6 + number)
            options: dict[str, Any] = {"generator": generator, "device": parameter.device}
            signs = torch.randint(0, 2, parameter.shape, dtype=torch.int8, **options).to(parameter.dtype)
            parameter.mul_(1 + torch.finfo(parameter.dtype).eps * (2 * signs - 1))


class Scores(TorchFunctionMode):
    """While it is entered, keeps what each top-k chooses among, in float32 on the host.

    calls: the scores, the choices along the last dimension, and how many are chosen
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Tensor, int]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _TOPK:
            self._keep(*args, **kwargs)
        return func(*args, **kwargs)

    def _keep(self, input: Tensor, k: int, dim: int = -1, *_: Any, **__: Any) -> None:
        if input.is_floating_point() and k < input.shape[dim]:
            self.calls.append((input.detach().movedim(dim, -1).float().cpu(), k))


def near_ties(before: Scores, after: Scores) -> int:
    """How many choices rounding may turn: those whose last one is ahead of the next by no more than ROUNDS
    times what the scores have moved by.
    """
    pairs = list(zip(before.calls, after.calls, strict=False))
    return sum(_near(*one, other) for one, (other, _) in pairs)


def _near(scores: Tensor, chosen: int, moved: Tensor) -> int:
    if scores.shape != moved.shape:  # another number of tokens got here: an earlier choice was another
        return scores[..., 0].numel()
    top = scores.topk(chosen + 1).values
    ahead = top[..., chosen - 1] - top[..., chosen]
    change = torch.where(scores == moved, 0.0, (scores - moved).abs()).amax(-1)  # inf stays where it is
    return int((ahead <= ROUNDS * change).sum())
