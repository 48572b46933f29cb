"""Runs that are refused, and runs of packed documents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.train.config.sections import TrainConfig
from penstock.train.preflight import preflight
from support.tiny import (
    config,
    write_documents,
)


def refused(kind: type[Exception], made: TrainConfig, resume: str | None = None) -> str:
    with pytest.raises(kind) as caught:
        preflight(made, resume)
    assert getattr(caught.value, "exit_code", None) == 2
    return str(caught.value)


def with_documents(
    folder: Path, model: dict[str, Any] | None = None, *, keys: Any = None, **train: Any
) -> TrainConfig:
    return config(folder, model, write_documents(folder) | (keys or {}), **train)
