"""Batches of documents, token by token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock.batch.padding import Padding
from penstock.errors import DataError
from penstock.train.config.sections import TrainConfig
from penstock.train.data.loading import Data, load_data
from penstock.train.data.packing import PACKINGS, cut
from penstock.train.data.rows import Batch, DocumentRows, Fill
from penstock.train.data.tokenizer import Bytes


def rows_of(documents: list[int], packing: str, microbatches: int = 2, **more: Any) -> DocumentRows:
    """Documents of these lengths; the token at place i of all documents is i + 1."""
    pieces = cut(np.array(documents, dtype=np.int64), 8)
    tokens = np.arange(1, sum(documents) + 1, dtype=np.uint32)
    return DocumentRows(tokens, pieces, PACKINGS[packing](pieces.lengths, 8), microbatches, **more)


def content(batch: Batch) -> list[dict[str, Tensor]]:
    assert isinstance(batch.content, list)
    return batch.content


def test_a_packed_batch_in_full() -> None:
    first, second = content(rows_of([3, 4, 2, 5], "sequential", flash=True).batch([0, 1]))
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
    (batch,) = content(rows.batch([0, 1]))
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 0, 0, 0]]
    assert batch["labels"][1].tolist() == [-100, 9, -100, 11, -100, -100, -100]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3], [0, 1, 0, 1, 2, 3, 4]]
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 7, 9, 14]
    assert batch["max_length_q"] == 5


def test_only_packed_rows_have_positions() -> None:
    (alone,) = content(rows_of([3, 4], "none", 1).batch([0, 1]))
    assert alone.keys() == {"input_ids", "labels"}
    (packed,) = content(rows_of([3, 4], "best_fit", 1).batch([0]))
    assert packed.keys() == {"input_ids", "labels", "position_ids"}


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
    if not len(rows):
        return
    everything = list(range(len(rows)))
    batch = rows.batch(everything)
    made = content(batch)
    assert len(made) == min(microbatches, len(rows))
    starts, lengths = rows.pieces.starts.tolist(), rows.pieces.lengths.tolist()
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

    assert batch.fill == rows.fill(everything)
    assert batch.fill.tokens == len(real)
    if padding is None:
        assert all(each["input_ids"][:, -1].max() for each in made)  # no longer than its longest row
    else:
        target = padding.lengths(padding.longest(made))
        made = [padding.pad(each, target) for each in made]
    assert batch.fill.slots == sum(each["input_ids"].numel() for each in made)


def test_rows_of_similar_length_share_a_microbatch() -> None:
    rows = rows_of([2, 8, 3, 7, 2, 8], "none", microbatches=3)
    assert [each["input_ids"].shape for each in content(rows.batch(range(6)))] == [
        (2, 8),
        (2, 7),
        (2, 2),
    ]
    assert rows.fill(range(6)) == Fill(30, 34)
    assert rows.fill(range(6)).padding == pytest.approx(4 / 34)


def load(path: Path, texts: list[str], packing: str, **more: Any) -> Data:
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    data = {"path": str(path), "tokenizer": "bytes", "sequence_length": 16, "packing": packing, **more}
    tree = {
        "model": {"config": {"model_type": "qwen3"}}, "data": data, "pipeline": {"microbatches": 2},
        "train": {"batch_size": 2, "seed": 3},
    }  # fmt: skip
    return load_data(TrainConfig.model_validate(tree), Bytes(), 256)


# each of one letter, which shows where its tokens went
TEXTS = [chr(ord("A") + number) * (2 + number % 11) for number in range(50)]


def letters(batches: list[Batch]) -> set[str]:
    ids = [each["input_ids"].flatten() for batch in batches for each in content(batch)]
    return {chr(token) for token in torch.cat(ids).tolist() if token}


@pytest.mark.parametrize("packing", PACKINGS)
def test_the_last_documents_are_held_out_and_never_trained_on(tmp_path: Path, packing: str) -> None:
    data = load(tmp_path / "a.jsonl", TEXTS, packing, held_out=0.3)
    epoch = -(-len(data.rows) // 2)
    trained = letters([data.batch(step) for step in range(1, epoch + 1)])
    held = letters([data.held_out.batch(range(len(data.held_out)))])
    assert sorted(trained | held) == [text[0] for text in TEXTS]
    assert max(trained) < min(held)
    share = sum(len(text) for text in TEXTS if text[0] in held) / sum(map(len, TEXTS))
    assert share == pytest.approx(0.3, abs=0.05)
    assert len(data.held_out_batches(3)) == 3


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_whole_batch_is_held_out_however_small_the_share(tmp_path: Path, packing: str) -> None:
    data = load(tmp_path / "a.jsonl", TEXTS, packing, held_out=0.001)
    assert 2 <= len(data.held_out) < len(data.rows)
    assert len(data.held_out_batches(9)) >= 1


@pytest.mark.parametrize("packing", PACKINGS)
def test_too_few_rows_are_refused(tmp_path: Path, packing: str) -> None:
    with pytest.raises(DataError, match="rows of at most 16, and a batch of 2 to train on and one held out"):
        load(tmp_path / "a.jsonl", ["ab", "cd", "ef"], packing)
    with pytest.raises(DataError, match="it gives 0 rows"):
        load(tmp_path / "a.jsonl", ["a"], packing)


@pytest.mark.parametrize("packing", ["sequential", "best_fit"])
def test_a_batch_follows_from_its_step_and_not_from_the_microbatches(tmp_path: Path, packing: str) -> None:
    data, again = (load(tmp_path / name, TEXTS, packing) for name in ("a.jsonl", "b.jsonl"))
    for step in (7, 1, 30):
        for one, other in zip(content(data.batch(step)), content(again.batch(step)), strict=True):
            assert all(torch.equal(one[name], other[name]) for name in one)
    assert isinstance(data.rows, DocumentRows)
    one_part = DocumentRows(data.rows.tokens, data.rows.pieces, data.rows.packing, 1)
    assert letters([Data(one_part, data.held_out, 2, 3).batch(5)]) == letters([data.batch(5)])


def test_the_expected_fill_is_that_of_the_first_steps(tmp_path: Path) -> None:
    data = load(tmp_path / "a.jsonl", TEXTS, "sequential")
    fills = [data.batch(step).fill for step in (1, 2, 3)]
    assert data.expected(3) == fills[0] + fills[1] + fills[2]
    assert data.expected(10**9) == data.expected(100)
