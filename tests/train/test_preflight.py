"""What is refused before a run begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.errors import (
    ConfigError,
    DataError,
    ModelError,
    PartitionError,
    WorldSizeError,
)
from penstock.train.preflight import preflight
from support.refused_runs import refused, with_documents
from support.tiny import (
    config,
)


@pytest.mark.parametrize(
    ("kind", "message", "model", "keys"),
    [
        (PartitionError, "layers", {}, {"pipeline.ranks": 9}),
        (ConfigError, "data.sequence_length=65: the model takes 64 pos", {}, {"data.sequence_length": 65}),
        # 0.2.0: it passed the dry run, and failed at the first step in every rank
        (ConfigError, "inference: it holds no backward", {}, {"pipeline.schedule": "inference"}),
        (ModelError, "model_type='t5'", {"model_type": "t5"}, {}),
        (ConfigError, "output.folder", {}, {"output.folder": "/dev/null/out"}),
        (DataError, "it is a device", {}, {"data.path": "/dev/null"}),
    ],
)
def test_what_is_wrong_is_found_before_a_weight_is_read(
    tmp_path: Path, kind: type[Exception], message: str, model: dict[str, Any], keys: dict[str, Any]
) -> None:
    assert message in refused(kind, config(tmp_path, model or None, keys))


def test_a_missing_gpu_and_a_wrong_world_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "torch sees no GPU" in refused(ConfigError, config(tmp_path, device="cuda"))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    said = refused(WorldSizeError, config(tmp_path))
    assert "pipeline.ranks=2: each rank is one process, and the world has 3" in said


def test_documents_are_not_packed_for_a_model_that_would_mix_them(tmp_path: Path) -> None:
    model = {"model_type": "mamba", "vocab_size": 256, "hidden_size": 16, "num_hidden_layers": 2}
    for packing in ("sequential", "best_fit"):
        made = with_documents(tmp_path, model, keys={"data.packing": packing})
        assert "its state runs over the whole row" in refused(ModelError, made)
    preflight(with_documents(tmp_path, model, keys={"data.packing": "none"}))
    preflight(config(tmp_path, model))


def test_padding_that_is_longer_than_the_model_takes_is_refused(tmp_path: Path) -> None:
    keys = {"pipeline.shapes": "padded", "pipeline.padding": {"multiple": 65}}
    said = refused(ConfigError, with_documents(tmp_path, keys=keys))
    assert "pipeline.padding, to 65 tokens a row: the model takes 64 positions" in said
