"""Microbatches split along the sequence, and those that cannot be."""

from __future__ import annotations

import pytest
import torch

from penstock.batch.packing import metadata
from penstock.errors import BatchError
from penstock.parallel.context.sequence import (
    FULL_SEQUENCE,
    FullSequence,
    concatenate,
    local_part,
    padded_length,
    pieces,
    split,
)
from support.refusals import refuses
from support.sequences import Batch, left, packed, plain


def test_each_rank_has_an_early_piece_and_the_late_one_that_mirrors_it() -> None:
    assert [pieces(rank, 3) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]
    row = torch.arange(12)[None]
    assert [local_part(row, 1, rank, 3).tolist() for rank in range(3)] == [
        [[0, 1, 10, 11]],
        [[2, 3, 8, 9]],
        [[4, 5, 6, 7]],
    ]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_the_parts_make_up_the_whole(count: int) -> None:
    whole = torch.randn(2, 24, 3)
    assert torch.equal(concatenate([local_part(whole, 1, rank, count) for rank in range(count)], 1), whole)


@pytest.mark.parametrize(("length", "count", "padded"), [(16, 2, 16), (17, 2, 20), (8, 4, 8), (9, 4, 16)])
def test_the_length_is_a_multiple_of_the_pieces(length: int, count: int, padded: int) -> None:
    assert padded_length(plain(1, length), count) == padded


def test_a_row_shorter_than_the_pieces_is_refused() -> None:
    with refuses(BatchError, "7 tokens a row", "over cp=4 ranks it is cut into 8 pieces"):
        split(plain(1, 7), 0, 4)


def test_positions_of_none_count_from_0() -> None:
    part = split({**plain(2, 8), "position_ids": None}, 0, 2)
    assert part["position_ids"].tolist() == [[0, 1, 6, 7]] * 2


def test_embeddings_are_split_too() -> None:
    batch: Batch = {"inputs_embeds": torch.randn(2, 9, 4), "labels": torch.zeros(2, 9, dtype=torch.int64)}
    parts = [split(batch, rank, 2) for rank in range(2)]
    whole = concatenate([one["inputs_embeds"] for one in parts], 1)
    assert torch.equal(whole[:, :9], batch["inputs_embeds"])
    assert bool((whole[:, 9:] == 0).all())


def test_documents_are_known_to_every_part() -> None:
    batch: Batch = {**plain(1, 10), **metadata([3, 7])}
    one = split(batch, 1, 2)
    whole: FullSequence = one[FULL_SEQUENCE]
    assert whole.documents is not None
    assert whole.documents.tolist() == [[0] * 3 + [1] * 7 + [-1] * 2]
    assert one["position_ids"].tolist() == [[0, 1, 2, 3, 4, 5]]
    assert not [name for name in one if name.startswith(("cu_seq", "max_length"))]


def test_padding_is_known_to_every_part_and_hides_no_documents() -> None:
    whole: FullSequence = split(left(), 0, 2)[FULL_SEQUENCE]
    assert whole.documents is None
    assert whole.mask is not None
    assert whole.mask[2].tolist() == [False] * 9 + [True] * 8 + [False] * 3
    with refuses(BatchError, "with packed documents"):
        split({**packed(), "attention_mask": torch.ones(2, 19)}, 0, 2)


REFUSED: dict[str, tuple[Batch, str, str]] = {
    "positions unknown": ({**plain(2, 8), "attention_mask": torch.tensor([[0] * 3 + [1] * 5] * 2)},
                          "padding before a valid token", "differ in their positions"),
    "a mask of pairs": ({**plain(2, 8), "attention_mask": torch.ones(2, 1, 8, 8)},
                        "[2, 1, 8, 8]", "split along the sequence"),
    "positions of three": ({**plain(2, 8), "position_ids": torch.zeros(3, 2, 8)},
                           "[3, 2, 8]", "split along the sequence"),
    "labels of rows": ({**plain(2, 8), "labels": torch.zeros(2)},
                       "labels of shape [2]", "split along the sequence"),
    "a sequence or not": ({**plain(2, 8), "scores": torch.zeros(2, 8)}, "scores", "a sequence or not"),
    "nothing to read": ({"labels": torch.zeros(2, 8)}, "['labels']", "input_ids or inputs_embeds"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_entries_that_cannot_be_split_are_refused(name: str) -> None:
    batch, value, rule = REFUSED[name]
    with refuses(BatchError, value, rule):
        split(batch, 0, 2)
