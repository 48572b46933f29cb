"""A step's batch, cut into microbatches."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.errors import BatchError
from penstock.runtime.shapes import Microbatch, TensorSpec, microbatch_key

Batch = Mapping[str, Any]
SplitDims = Mapping[str, int | None]


def batch_rows(batch: Batch, dims: SplitDims) -> int:
    """The length that every tensor of `batch` has along its split dimension.

    dims: dimension by entry name; 0 for entries not named, None for entries that every microbatch gets whole.
    Entries that are no tensors, and tensors of no dimension, are never split. Raises BatchError.
    """
    lengths: dict[str, int] = {}
    for name, value in batch.items():
        dim = dims.get(name, 0)
        if dim is None or not isinstance(value, Tensor) or value.dim() == 0:
            continue
        if not -value.dim() <= dim < value.dim():
            raise BatchError(
                f"{name} of shape {list(value.shape)}",
                f"it is to be split along dimension {dim}, which it does not have",
                "Name another dimension for it in split_dims, or None to give it whole to every microbatch",
            )
        lengths[name] = value.shape[dim]
    if not lengths:
        raise BatchError(f"a batch of {sorted(batch)}", "none of it can be split", "Give at least one tensor")
    if len(set(lengths.values())) > 1:
        raise BatchError(
            ", ".join(f"{name}: {length}" for name, length in lengths.items()),
            "all tensors of a batch have the same length along the dimension they are split on",
            "Mend the batch, or name each tensor's dimension in split_dims (None: not split)",
        )
    return next(iter(lengths.values()))


def split(batch: Batch, count: int, dims: SplitDims) -> list[Microbatch]:
    """Cut `batch` into `count` microbatches, the first ones longer by one where it does not divide.

    Raises BatchError where it has fewer rows than microbatches.
    """
    rows = batch_rows(batch, dims)
    if rows < count:
        raise BatchError(
            f"a batch of {rows} rows",
            f"it is to be split into {count} microbatches of at least one row each",
            f"Give {count} rows or more, or set microbatches to at most {rows}",
        )
    pieces: list[dict[str, Any]] = [{} for _ in range(count)]
    for name, value in batch.items():
        dim = dims.get(name, 0)
        if dim is None or not isinstance(value, Tensor) or value.dim() == 0:
            parts: Any = [value] * count
        else:
            parts = value.tensor_split(count, dim=dim)
        for piece, part in zip(pieces, parts, strict=True):
            piece[name] = part
    return list(pieces)


def fingerprint(batch: Batch, microbatches: Sequence[Microbatch], schedule: int) -> tuple[int, str]:
    """A number that is equal on ranks that work on the same step, and what stands behind it in words.

    schedule: a number that is equal where the schedule is
    """
    sums = {name: checksum(value) for name, value in batch.items() if isinstance(value, Tensor)}
    first = ", ".join(
        f"{name} {TensorSpec.of(value)}" if isinstance(value, Tensor) else name
        for name, value in microbatches[0].items()
    )
    told = f"schedule {schedule:08x}, {len(microbatches)} microbatches, the first {first}, checksums {sums}"
    shapes = microbatch_key(batch), len(microbatches)
    return zlib.crc32(repr((schedule, shapes, sums)).encode()), told


_SAMPLED = 1 << 16
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: Tensor) -> int:
    """The sum of the entries' bits as whole numbers: exact, so any device and order gives the same.

    Of a large tensor every n-th entry is taken, so that a step does not begin with a pass over its data.
    """
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    flat = tensor.contiguous().view(-1)
    step = -(-flat.numel() // _SAMPLED) or 1
    return int(flat.view(_SAME_SIZE[tensor.element_size()])[::step].sum())
