"""Batches of documents, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.batch.padding import Padding
from penstock.train.data.packing import PACKINGS, cut
from penstock.train.data.rows import CutRows, DocumentLayout, Fill, SourceRows
from support.stores import in_memory


class Made(NamedTuple):
    rows: SourceRows | CutRows
    layout: DocumentLayout

    def content(self, chosen: Sequence[int]) -> list[dict[str, Any]]:
        return self.layout.content(self.rows, chosen)

    def fill(self, chosen: Sequence[int]) -> Fill:
        return self.layout.fill(self.rows, chosen)


def rows_of(
    documents: list[int], packing: str, microbatches: int = 2, labels: list[int] | None = None, **more: Any
) -> Made:
    """Documents of these lengths; the token at place i of all documents is i + 1."""
    lengths = np.array(documents, dtype=np.int64)
    pieces = cut(lengths, 8)
    tokens = np.arange(1, sum(documents) + 1, dtype=np.uint32)
    store = in_memory(tokens, lengths, None if labels is None else np.array(labels, dtype=np.int32))
    rows = SourceRows(store, pieces, PACKINGS[packing](pieces.lengths, 8))
    return Made(rows, DocumentLayout((microbatches,), packing != "none", **more))


def test_a_packed_batch_in_full() -> None:
    first, second = rows_of([3, 4, 2, 5], "sequential", flash=True).content([0, 1])
    assert first["input_ids"].tolist() == [[1, 2, 3, 4, 5, 6, 7]]
    assert first["labels"].tolist() == [[-100, 2, 3, -100, 5, 6, 7]]
    assert first["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3]]
    assert first["cu_seq_lens_q"].tolist() == first["cu_seq_lens_k"].tolist() == [0, 3, 7]
    assert [first["max_length_q"], first["max_length_k"]] == [4, 4]
    assert second["input_ids"].tolist() == [[8, 9, 10, 11, 12, 13, 14]]
    assert first["input_ids"].dtype == first["labels"].dtype == first["position_ids"].dtype == torch.int64
    assert first["cu_seq_lens_q"].dtype == torch.int32


def test_padding_goes_to_the_last_document_of_its_row() -> None:
    rows = rows_of([3, 4, 2, 2, 8, 3], "sequential", microbatches=1, flash=True)  # rows of 7, 4, 8 and 3
    (batch,) = rows.content([0, 1])
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 0, 0, 0]]
    assert batch["labels"][1].tolist() == [-100, 9, -100, 11, -100, -100, -100]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3], [0, 1, 0, 1, 2, 3, 4]]
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 7, 9, 14]
    assert batch["max_length_q"] == 5


def test_only_packed_rows_have_positions() -> None:
    (alone,) = rows_of([3, 4], "none", 1).content([0, 1])
    assert alone.keys() == {"input_ids", "labels"}
    (packed,) = rows_of([3, 4], "best_fit", 1).content([0])
    assert packed.keys() == {"input_ids", "labels", "position_ids"}


@settings(deadline=None)  # the first example imports what pads
@given(
    packing=st.sampled_from([*PACKINGS]),
    documents=st.lists(st.integers(0, 20), min_size=1, max_size=12),
    microbatches=st.integers(1, 4),
    padding=st.sampled_from([None, Padding(), Padding(length=10), Padding(multiple=3)]),
)
def test_every_token_is_there_once_and_predicted_by_its_own_document(
    packing: str, documents: list[int], microbatches: int, padding: Padding | None
) -> None:
    rows = rows_of(documents, packing, microbatches, padding=padding)
    if not len(rows.rows):
        return
    everything = list(range(len(rows.rows)))
    made = rows.content(everything)
    assert len(made) == min(microbatches, len(rows.rows))
    assert isinstance(rows.rows, SourceRows)
    starts, lengths = rows.rows.pieces.starts.tolist(), rows.rows.pieces.lengths.tolist()
    first = {start + 1 for start in starts}
    ids = torch.cat([each["input_ids"].flatten() for each in made])
    labels = torch.cat([each["labels"].flatten() for each in made])
    real = sorted(ids[ids > 0].tolist())
    assert real == sorted(
        at + 1 for start, length in zip(starts, lengths, strict=True) for at in range(start, start + length)
    )
    assert sorted(labels[labels > 0].tolist()) == [token for token in real if token not in first]
    for each in made:
        predicting, predicted = each["input_ids"][:, :-1], each["labels"][:, 1:]
        assert torch.equal(predicted[predicted > 0], predicting[predicted > 0] + 1)
        if "position_ids" in each:
            restarts = (each["position_ids"] == 0) & (each["input_ids"] > 0)
            assert set(each["input_ids"][restarts].tolist()) <= first

    fill = rows.fill(everything)
    assert fill.tokens == len(real)
    assert fill.squares == sum(length**2 for length in lengths)
    if padding is None:
        assert all(each["input_ids"][:, -1].max() for each in made)  # no longer than its longest row
    else:
        target = padding.lengths(padding.longest(made))
        made = [padding.pad(each, target) for each in made]
    assert fill.slots == sum(each["input_ids"].numel() for each in made)


def test_rows_of_similar_length_share_a_microbatch() -> None:
    rows = rows_of([2, 8, 3, 7, 2, 8], "none", microbatches=3)
    assert [each["input_ids"].shape for each in rows.content(range(6))] == [
        (2, 8),
        (2, 7),
        (2, 2),
    ]
    assert rows.fill(range(6)) == Fill(30, 34, 4 + 64 + 9 + 49 + 4 + 64)
    assert rows.fill(range(6)).padding == pytest.approx(4 / 34)


@pytest.mark.parametrize("packing", PACKINGS)
def test_labels_go_through_packing_with_their_tokens(packing: str) -> None:
    labels = [-100, 2, -100, 4, -100, -100, 7, 8, -100, -100, 11]
    made = rows_of([4, 5, 2], packing, labels=labels)
    batches = made.content(range(len(made.rows)))
    pairs = [
        (token, label)
        for each in batches
        for token, label in zip(
            each["input_ids"].flatten().tolist(), each["labels"].flatten().tolist(), strict=True
        )
        if token
    ]
    assert sorted(pairs) == list(enumerate(labels, start=1))


def test_rows_that_are_cut_end_within_a_document_or_before_it() -> None:
    whole = rows_of([3, 4, 2, 5], "sequential", microbatches=1, flash=True)  # rows of 3 + 4 and of 2 + 5
    (batch,) = whole._replace(rows=CutRows(whole.rows, 5)).content([0, 1])
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5], [8, 9, 10, 11, 12]]
    assert batch["labels"].tolist() == [[-100, 2, 3, -100, 5], [-100, 9, -100, 11, 12]]
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 5, 7, 10]
    (batch,) = whole._replace(rows=CutRows(whole.rows, 3)).content([0, 1])
    assert batch["position_ids"].tolist() == [[0, 1, 2], [0, 1, 0]]
    assert whole._replace(rows=CutRows(whole.rows, 3)).fill([0, 1]) == Fill(6, 6, 9 + 4 + 1)


def test_each_call_is_padded_by_itself() -> None:
    rows = rows_of([8, 7, 3, 2, 2], "none", padding=Padding(multiple=4))
    rows = rows._replace(layout=replace(rows.layout, calls=(2, 3)))
    assert [each["input_ids"].shape[1] for each in rows.content(range(5))] == [8, 7, 3, 2, 2]
    assert rows.fill(range(5)).slots == 2 * 8 + 3 * 4
    assert rows.fill([0, 1]).slots == 2 * 8  # and no row for the second call
