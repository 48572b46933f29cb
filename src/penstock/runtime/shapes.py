"""What comes over an edge, known before it comes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.errors import ShapeError
from penstock.schedule import Op

Microbatch = Mapping[str, Any]


class TensorSpec(NamedTuple):
    """Shape and dtype of one tensor on an edge. Floating-point tensors have a gradient, others have none."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        return cls(tuple(tensor.shape), tensor.dtype)

    @property
    def carries_gradient(self) -> bool:
        return self.dtype.is_floating_point or self.dtype.is_complex

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


EdgeSpecs = tuple[TensorSpec, ...]


def gradient_specs(forward: EdgeSpecs) -> EdgeSpecs:
    """What comes back over the edge that `forward` went out on."""
    return tuple(spec for spec in forward if spec.carries_gradient)


def check(op: Op, tensors: Sequence[Tensor], expected: EdgeSpecs) -> None:
    """Refuse to send what the receiver has posted no fitting buffer for.

    gloo would part-fill a buffer that is too long, reinterpret another dtype, and abort the receiving
    process on one that is too short. Raises ShapeError.
    """
    if [(tensor.shape, tensor.dtype) for tensor in tensors] != list(expected):
        raise ShapeError(
            f"{op} gave {describe([TensorSpec.of(tensor) for tensor in tensors])}",
            f"the next rank expects {describe(expected)}",
            "Make the stage's output follow from its input's shape and the model's dtype",
        )


def describe(specs: Sequence[TensorSpec]) -> str:
    return ", ".join(map(str, specs)) or "nothing"


def microbatch_key(microbatch: Microbatch) -> tuple[Any, ...]:
    """Equal for two microbatches whose tensors have the same names, shapes and dtypes."""
    return tuple(
        (name, TensorSpec.of(value) if isinstance(value, Tensor) else type(value).__name__)
        for name, value in sorted(microbatch.items())
    )
