"""Which rows of a trainer's batch a rank takes, and in which microbatches.

batch of 5 rows, 2 data-parallel parts      0 1 2 3 4 -      one row more, without labels
part 0, 2 microbatches                      0 1 | 2
part 1, 2 microbatches                      3 4 | -
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from penstock.batch.microbatches import batch_rows, split_batch
from penstock.batch.shapes import Microbatch
from penstock.errors import BatchError

_IGNORED = -100  # a label that no loss counts


def own_rows(batch: Mapping[str, Any], part: int, parts: int) -> dict[str, Any]:
    """The rows of one of `parts` equal parts of a batch.

    A batch that does not divide gets copies of its last row, whose labels no loss counts: then gradients and
    the loss, means over tokens, stay those of the batch.

    Args:
        batch: tensors (rows, ...); other values go to every part

    Raises BatchError for a batch without labels that does not divide.
    """
    if parts == 1:
        return dict(batch)
    missing = -batch_rows(batch, {}) % parts
    if missing and "labels" not in batch:
        rule = (
            f"its rows are divided among {parts} data-parallel parts, and only rows with labels can be added"
        )
        raise BatchError("a batch without labels", rule, f"Give a batch size that {parts} divides, or labels")
    return {
        name: _with_rows(name, value, missing).chunk(parts)[part] if _has_rows(value) else value
        for name, value in batch.items()
    }


def _has_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _with_rows(name: str, value: Tensor, count: int) -> Tensor:
    """`value` with its last row `count` times more; labels are ignored there."""
    more = value[-1:].expand(count, *value.shape[1:])
    return torch.cat([value, torch.full_like(more, _IGNORED) if name == "labels" else more])


def microbatches_of(part: Mapping[str, Any], most: int) -> list[Microbatch]:
    """`part` in at most `most` microbatches of one row or more."""
    return split_batch(part, min(most, batch_rows(part, {})))
