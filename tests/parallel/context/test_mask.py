"""The attention mask of a full sequence, piece by piece, on a rank that has a part of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from penstock.errors import ModelError
from penstock.parallel.context.mask import Mask
from penstock.parallel.context.sequence import FullSequence
from support.refusals import refuses

LENGTH = 8  # four pieces of two tokens, on two ranks


def full(mask: Tensor | None = None, documents: Tensor | None = None, positions: Any = None) -> FullSequence:
    positions = torch.arange(LENGTH)[None] if positions is None else torch.tensor(positions)[None]
    return FullSequence(0, 2, LENGTH, LENGTH, positions, mask, documents)


def mask_of(sequence: FullSequence, window: int | None = None) -> Mask:
    rule = causal_mask_function if window is None else sliding_window_causal_mask_function(window)
    return Mask(rule, sequence, window, "sdpa", torch.float32)


def whole(mask: Mask) -> Tensor:
    """All pieces together: bool (queries, keys) of the only row."""
    pieces = [[mask.between(queries, keys) for keys in range(4)] for queries in range(4)]
    known = [
        [torch.ones(2, 2, dtype=torch.bool) if p is None else p.view(2, 2) for p in row] for row in pieces
    ]
    return torch.cat([torch.cat(row, dim=1) for row in known])


def test_pieces_make_up_the_mask_of_one_process() -> None:
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    assert torch.equal(whole(mask_of(full())), causal)
    assert mask_of(full()).between(2, 0) is None  # all true
    assert torch.equal(whole(mask_of(full(), window=3)), causal.triu(-2))
    padding = torch.tensor([[False] * 3 + [True] * 5])
    assert torch.equal(whole(mask_of(full(padding))), causal & padding)


def test_no_document_sees_another() -> None:
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
    mask = mask_of(full(documents=documents, positions=[0, 1, 2, 0, 1, 2, 3, 4]))
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    assert torch.equal(whole(mask), causal & (documents[0][:, None] == documents[0]))


def test_pieces_out_of_reach_are_known() -> None:
    plain, window = mask_of(full()), mask_of(full(), window=3)
    assert [plain.reaches(2, keys) for keys in range(4)] == [True, True, True, False]
    assert [window.reaches(3, keys) for keys in range(4)] == [False, False, True, True]
    assert [bool(whole(window)[6:, 2 * keys : 2 * keys + 2].any()) for keys in range(4)] == [
        window.reaches(3, keys) for keys in range(4)
    ]


def test_queries_without_any_key_are_those_before_the_first_valid_token() -> None:
    assert mask_of(full()).without_keys is None
    padding = torch.tensor([[False] + [True] * 7])
    lonely = mask_of(full(padding)).without_keys
    assert lonely is not None
    assert lonely.tolist() == [[True, False, False, False]]


@pytest.mark.parametrize(
    "use",
    [
        lambda mask: mask.shape,
        lambda mask: mask[0],
        lambda mask: mask[:, 0],
        lambda mask: mask + 1,
        lambda mask: bool(mask),
    ],
)
def test_a_model_that_reads_the_mask_itself_is_refused(use: Any) -> None:
    with refuses(ModelError, "its attention mask by itself"):
        use(mask_of(full()))
    mask = mask_of(full())
    assert mask[:, :] is mask  # all of it
