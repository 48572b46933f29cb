"""Small files of texts, and the data of a run on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.batch.padding import Padding
from penstock.errors import DataError
from penstock.train.config.sections import TrainConfig
from penstock.train.data.batches import Data, LoadedBatch
from penstock.train.data.loading import load_data
from penstock.train.encoding.tokenizer import ByteTokenizer

# each of one letter, which shows where its tokens went
TEXTS = [chr(ord("A") + number) * (2 + number % 11) for number in range(50)]


def config(path: Path, **data: Any) -> TrainConfig:
    section = {"path": str(path), "tokenizer": "bytes", "sequence_length": 4, **data}
    train = {"batch_size": 2, "seed": 3}
    model = {"config": {"model_type": "qwen3"}}
    return TrainConfig.model_validate(
        {"model": model, "data": section, "train": train, "pipeline": {"microbatches": 2}}
    )


def load(path: Path, vocabulary: int = 256, padding: Padding | None = None, **data: Any) -> Data:
    return load_data(config(path, **data), ByteTokenizer(), vocabulary, padding=padding)


def load_texts(path: Path, texts: list[str], packing: str, **more: Any) -> Data:
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return load(path, **{"sequence_length": 16, "packing": packing, **more})


def microbatches(batch: LoadedBatch) -> list[dict[str, Any]]:
    assert isinstance(batch.content, list)
    return batch.content


def letters(batches: list[LoadedBatch]) -> set[str]:
    ids = [each["input_ids"].flatten() for batch in batches for each in microbatches(batch)]
    return {chr(token) for token in torch.cat(ids).tolist() if token}


def fail_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the data raise a DataError for "row 7" where the batch of a step is made."""
    original = Data.batch

    def batch(data: Data, number: int) -> LoadedBatch:
        if number == step:
            raise DataError("row 7", "it cannot be read", "Mend it")
        return original(data, number)

    monkeypatch.setattr(Data, "batch", batch)
