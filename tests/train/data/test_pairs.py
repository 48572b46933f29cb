from __future__ import annotations

import numpy as np
import torch

from penstock.batch.loss import IGNORED
from penstock.train.data.pairs import PairLayout, pair_each, whole_pairs
from penstock.train.data.rows import SourceRows, StoredRows
from support.stores import in_memory

LENGTHS = [4, 2, 3, 6, 5, 4]  # three pairs


def rows(capacity: int = 8, overlong: str = "truncate", first: int = 1) -> StoredRows:
    """Tokens are numbered through; of each document those from `first` on count."""
    ids = np.arange(sum(LENGTHS))
    labels = np.concatenate([np.where(np.arange(n) < first, IGNORED, 1) for n in LENGTHS])
    store = in_memory(ids, LENGTHS, labels.astype(np.int32))
    pieces = whole_pairs(store, capacity, overlong)
    return StoredRows((SourceRows(store, pieces, pair_each(pieces.lengths, capacity)),))


def test_a_row_is_a_pair_and_becomes_two_rows_of_a_batch() -> None:
    made = rows()
    assert [made.lengths(row) for row in range(len(made))] == [[4, 2], [3, 6], [5, 4]]
    layout = PairLayout((2,), packed=False)
    batch = layout.content(made, [0, 1, 2])
    assert layout.order(made, [0, 1, 2]) == [1, 2, 0]
    assert [part["input_ids"].shape for part in batch] == [(4, 6), (2, 4)]
    assert batch[0]["input_ids"][:, 0].tolist() == [6, 9, 15, 20]
    assert batch[1]["input_ids"].tolist() == [[0, 1, 2, 3], [4, 5, 0, 0]]
    fill = layout.fill(made, [0, 1, 2])
    assert (fill.tokens, fill.slots) == (24, sum(part["input_ids"].numel() for part in batch))


def test_a_batch_has_the_reference_of_its_rows() -> None:
    made = StoredRows(rows().sources, np.arange(6.0).reshape(3, 2))
    batch = PairLayout((2,), packed=False, refers=True).content(made, [0, 1, 2])
    assert [part["reference_logps"].tolist() for part in batch] == [[2, 3, 4, 5], [0, 1]]
    assert batch[0]["reference_logps"].dtype == torch.float64
    assert "reference_logps" not in PairLayout((2,), packed=False).content(made, [0, 1, 2])[0]


def test_a_pair_goes_whole() -> None:
    assert [rows(4).lengths(row) for row in range(3)] == [[4, 2], [3, 4], [4, 4]]
    assert [rows(4, "drop").lengths(row) for row in range(len(rows(4, "drop")))] == [[4, 2]]
    assert [rows(first=3).lengths(row) for row in range(len(rows(first=3)))] == [[5, 4]]
