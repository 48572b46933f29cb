"""Batches whose sequences are hard to split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from penstock.batch.packing import metadata
from support.families import ragged_batch

Batch = dict[str, Any]


def plain(rows: int = 3, length: int = 16) -> Batch:
    return {**ragged_batch(rows, length)}


def odd() -> Batch:
    """A length that no number of pieces divides, longer than most windows of the test families."""
    return plain(4, 19)


def right() -> Batch:
    batch = plain(4, 17)
    mask = torch.ones(4, 17, dtype=torch.int64)
    mask[0, 12:], mask[2, 5:] = 0, 0
    batch["labels"] = batch["labels"].masked_fill(mask == 0, -100)
    return {**batch, "attention_mask": mask}


def left() -> Batch:
    """The first valid tokens keep their labels, which are predicted from padding."""
    batch = plain(4, 17)
    mask = torch.ones(4, 17, dtype=torch.int64)
    mask[0, :3], mask[2, :9] = 0, 0
    batch["labels"] = batch["input_ids"].masked_fill(mask == 0, -100)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return {**batch, "attention_mask": mask, "position_ids": positions}


def packed() -> Batch:
    """Two rows of documents; the boundaries are not those of the cut."""
    rows = [metadata(lengths)["position_ids"] for lengths in ([3, 9, 1, 6], [11, 8])]
    positions = torch.cat(rows)
    batch = plain(2, 19)
    labels = batch["input_ids"].masked_fill(positions == 0, -100)
    return {**batch, "labels": labels, "position_ids": positions}


BATCHES: dict[str, Callable[[], Batch]] = {
    "plain": plain, "odd": odd, "right": right, "left": left, "packed": packed,
}  # fmt: skip
