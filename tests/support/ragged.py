"""Microbatches that differ in rows and length, and packed documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.batch.packing import metadata

Microbatches = list[dict[str, Any]]


def tokens(rows: int, length: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 64, (rows, length), generator=generator)


def ragged(count: int, seed: int = 0) -> Microbatches:
    """Rows from 1 to 3, lengths from 3 to 12, and a last one of a single short row."""
    found: Microbatches = []
    for number in range(count):
        last = number == count - 1
        rows = 1 if last else 1 + (number * 5 + seed) % 3
        length = 3 if last else 4 + (number * 7 + seed) % 9
        ids = tokens(rows, length, seed * 1000 + number)
        labels = ids.clone()
        labels[0, : number % 3] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def documents(count: int, seed: int = 0) -> list[list[Tensor]]:
    """For each microbatch the documents of one row."""
    return [
        [
            tokens(1, 2 + (number + 3 * document + seed) % 6, seed * 999 + number * 10 + document)[0]
            for document in range(1 + (number + seed) % 3)
        ]
        for number in range(count)
    ]


def packed(rows: Sequence[Sequence[Tensor]]) -> Microbatches:
    """One row a microbatch; no token is predicted from the document before."""
    found: Microbatches = []
    for row in rows:
        labels = [torch.cat([document.new_full((1,), -100), document[1:]]) for document in row]
        found.append(
            {
                "input_ids": torch.cat(list(row))[None],
                "labels": torch.cat(labels)[None],
                **metadata([len(document) for document in row]),
            }
        )
    return found


def apart(rows: Sequence[Sequence[Tensor]]) -> Microbatches:
    """The same documents, each in a microbatch of its own."""
    return [{"input_ids": document[None], "labels": document[None]} for row in rows for document in row]
