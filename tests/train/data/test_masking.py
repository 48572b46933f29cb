"""Masks are those of transformers, and the same on any mesh and after any resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import DataCollatorForLanguageModeling

from penstock.errors import DataError
from penstock.train.data.masking import MaskedRows, Masking
from penstock.train.data.rows import HeldRows, Piece
from penstock.train.encoding.tokenizer import ByteTokenizer, HuggingFace
from support.masked import MASK, WORDS, save_tokenizer
from support.refusals import refuses

ROW = np.array([2, *([5, 6, 7, 8, 15] * 40), 3])


def masking(folder: Path, probability: float = 0.3) -> Masking:
    return Masking.of("a", HuggingFace(save_tokenizer(folder)), len(WORDS), probability, 3)


def read(rows: MaskedRows, row: int = 0) -> tuple[list[int], list[int]]:
    (piece,) = rows.read(row)
    return piece.ids.tolist(), piece.labels.tolist()


def test_masks_are_those_of_the_collator_of_transformers(tmp_path: Path) -> None:
    rows = HeldRows([[Piece(ROW, ROW)]])
    ids, labels = read(MaskedRows(rows, masking(tmp_path), 5))
    collator = DataCollatorForLanguageModeling(masking(tmp_path).own, mlm_probability=0.3)
    collator.generator = np.random.default_rng((3, 5, 0))
    expected = collator.numpy_mask_tokens(ROW[None].copy())
    assert [ids, labels] == [array[0].tolist() for array in expected]
    assert rows[0][0].ids.tolist() == ROW.tolist()  # which are not changed
    masked = [at for at, label in enumerate(labels) if label != -100]
    assert 0.2 * len(ROW) < len(masked) < 0.4 * len(ROW)
    assert all(labels[at] == ROW[at] for at in masked)
    assert all(ids[at] == ROW[at] for at in range(len(ROW)) if at not in masked)
    assert 0.6 * len(masked) < sum(ids[at] == MASK for at in masked) < 0.95 * len(masked)
    assert {0, len(ROW) - 1}.isdisjoint(masked)  # special tokens


def test_step_and_row_determine_the_masks(tmp_path: Path) -> None:
    made, rows = masking(tmp_path), HeldRows([[Piece(ROW, ROW)]] * 2)
    first = read(MaskedRows(rows, made, 1))
    assert read(MaskedRows(rows, made, 1)) == first
    assert read(MaskedRows(rows, made, 2)) != first
    assert read(MaskedRows(rows, made, 1), 1) != first
    assert len(MaskedRows(rows, made, 1)) == 2
    assert MaskedRows(rows, made, 1).lengths(0) == [len(ROW)]


def test_a_text_always_has_a_masked_token(tmp_path: Path) -> None:
    """Of few tokens most draws mask none: any of them is then the one, and no special one ever."""
    short, made, chosen = np.array([2, 5, 6, 7, 3]), masking(tmp_path, 0.01), set()
    for step in range(1, 40):
        ids, labels = read(MaskedRows(HeldRows([[Piece(short, short)]]), made, step))
        (at,) = (place for place, label in enumerate(labels) if label != -100)
        assert labels[at] == short[at]
        assert [*ids[:at], *ids[at + 1 :]] == [*short[:at], *short[at + 1 :]]
        chosen.add(at)
    assert chosen == {1, 2, 3}
    alone = np.array([2, 3])
    assert read(MaskedRows(HeldRows([[Piece(alone, alone)]]), made, 1)) == ([2, 3], [-100, -100])


def test_a_tokenizer_without_a_mask_token_is_refused(tmp_path: Path) -> None:
    without: Any = HuggingFace("bytes")
    for tokenizer in (ByteTokenizer(), without):
        with refuses(DataError, "data.tokenizer=a", "this tokenizer has none", "masked language model"):
            Masking.of("a", tokenizer, 300, 0.15, 0)


@pytest.mark.parametrize("more", [0, 1])
def test_every_random_token_is_one_of_the_model(more: int, tmp_path: Path) -> None:
    tokenizer = HuggingFace(save_tokenizer(tmp_path))
    if more:
        assert Masking.of("a", tokenizer, len(WORDS), 0.15, 0)
        return
    with refuses(DataError, "data.tokenizer=a", "it gives token id 24 and the model has ids 0 to 23"):
        Masking.of("a", tokenizer, len(WORDS) - 1, 0.15, 0)
