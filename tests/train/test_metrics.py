"""One row a line, whatever happened to the run before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.train.metrics import Metrics


def written(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_fresh_run_starts_the_file_anew_and_a_resumed_one_drops_what_it_repeats(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(path)
    for step in range(5):
        metrics.write({"step": step, "loss": 1.0})
        assert written(path)[-1] == step  # there at once
    with path.open("a") as file:
        file.write('{"step": 5, "lo')  # a crash in the middle of a line
    resumed = Metrics(path, resumed_at=2)
    resumed.write({"step": 3})
    assert written(path) == [0, 1, 2, 3]
    Metrics(path)
    assert written(path) == []
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_what_is_no_number_is_no_metric(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match="JSON"):
        metrics.write({"step": 1, "loss": float("nan")})
