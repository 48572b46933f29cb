from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from penstock.batch.loss import ProblemType
from penstock.train.data.labelled import LabelledLayout
from penstock.train.data.rows import FilledRows, HeldRows, Piece

SEVERAL: ProblemType = "multi_label_classification"


def held(labels: list[tuple[float, ...] | None]) -> HeldRows:
    """Rows of 1, 2, 3 ... tokens; their tokens have the labels 0, 1, 2 ..."""
    return HeldRows(
        [[Piece(np.arange(5, 6 + at), np.arange(at + 1), None, label)] for at, label in enumerate(labels)]
    )


def test_tokens_have_labels_from_the_first_on_and_padding_none() -> None:
    (batch,) = LabelledLayout((1,), False, pad=9).content(held([None, None]), [0, 1])
    assert batch["input_ids"].tolist() == [[5, 6], [5, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1], [1, 0]]
    assert batch["labels"].tolist() == [[0, 1], [0, -100]]
    assert {entry.dtype for entry in batch.values()} == {torch.int64}


@pytest.mark.parametrize(
    ("problem", "labels", "expected", "dtype"),
    [
        ("single_label_classification", [(2.0,), (0.0,)], [0, 2], torch.int64),
        ("regression", [(0.5,), (-1.0,)], [-1.0, 0.5], torch.float32),
        ("regression", [(0.5, 1.0), (2.0, 3.0)], [[2.0, 3.0], [0.5, 1.0]], torch.float32),
        (SEVERAL, [(1.0, 0.0), (0.0, 1.0)], [[0.0, 1.0], [1.0, 0.0]], torch.float32),
    ],
)
def test_rows_have_their_labels_in_the_order_of_the_rows(
    problem: Any, labels: Any, expected: Any, dtype: torch.dtype
) -> None:
    (batch,) = LabelledLayout((1,), False, problem=problem).content(held(labels), [0, 1])
    assert (batch["labels"].tolist(), batch["labels"].dtype) == (expected, dtype)


def test_a_row_that_stands_in_for_a_missing_one_does_not_count() -> None:
    layout = LabelledLayout((1,), False, problem="single_label_classification")
    rows: Any = FilledRows(held([(1.0,)]))
    (batch,) = layout.content(rows, [0, 1])
    assert batch["labels"].tolist() == [1, -100]
    assert layout.ignores
    assert not LabelledLayout((1,), False, problem=SEVERAL).ignores
