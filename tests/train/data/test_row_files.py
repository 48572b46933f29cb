"""Which documents are held out, and that none of their tokens is trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.train.data.batches import LoadedBatch
from penstock.train.data.loading import load_data
from penstock.train.data.packing import PACKINGS
from penstock.train.data.rows import Fill
from penstock.train.encoding.tokenizer import ByteTokenizer
from support.texts import TEXTS, config, letters, load_texts


@pytest.mark.parametrize("packing", PACKINGS)
def test_the_last_documents_are_held_out_and_never_trained_on(tmp_path: Path, packing: str) -> None:
    data = load_texts(tmp_path / "a.jsonl", TEXTS, packing, held_out=0.3, held_out_from="end")
    epoch = -(-len(data.rows) // 2)
    trained = letters([data.batch(step) for step in range(1, epoch + 1)])
    held = letters([LoadedBatch(data.layout.content(data.held_out, range(len(data.held_out))), Fill())])
    assert sorted(trained | held) == [text[0] for text in TEXTS]
    assert max(trained) < min(held)
    share = sum(len(text) for text in TEXTS if text[0] in held) / sum(map(len, TEXTS))
    assert share == pytest.approx(0.3, abs=0.05)
    assert len(data.held_out_batches(3)) == 3


@pytest.mark.parametrize("packing", PACKINGS)
def test_random_documents_are_held_out_by_the_seed(tmp_path: Path, packing: str) -> None:
    def split(seed: int = 0, **keys: Any) -> tuple[set[str], set[str], str]:
        load_texts(tmp_path / "a.jsonl", TEXTS, packing)  # writes the file
        keys |= {"sequence_length": 16, "packing": packing, "held_out": 0.3}
        made = config(tmp_path / "a.jsonl", **keys)
        made = made.model_copy(update={"train": made.train.model_copy(update={"seed": seed})})
        data = load_data(made, ByteTokenizer(), 256)
        trained, held = (letters([LoadedBatch(data.layout.content(rows, range(len(rows))), Fill())])
              for rows in (data.rows, data.held_out))  # fmt: skip
        return trained, held, data.digest

    trained, held, digest = split()
    assert sorted(trained | held) == [text[0] for text in TEXTS]
    assert not trained & held
    assert max(trained) > min(held)  # not the end
    assert split() == (trained, held, digest)
    assert split(seed=1)[1] != held
    end = split(held_out_from="end")
    assert min(end[1]) > max(end[0])
    assert len({digest, split(seed=1)[2], end[2]}) == 3  # a resumed run notices another split
    assert split(seed=1, held_out_from="end")[2] == end[2]


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_whole_batch_is_held_out_however_small_the_share(tmp_path: Path, packing: str) -> None:
    data = load_texts(tmp_path / "a.jsonl", TEXTS, packing, held_out=0.001)
    assert 2 <= len(data.held_out) < len(data.rows)
    assert len(data.held_out_batches(9)) >= 1
