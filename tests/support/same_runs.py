"""Runs that must have the rows and the weights of another one: on a mesh and alone, resumed and at once."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from penstock.train.config.sections import TrainConfig
from penstock.train.preflight import preflight
from penstock.train.run import run
from support import jobs_train
from support.pool import Pool
from support.tiny import assert_same_tensors, checkpoint, metrics

Rows = list[dict[str, Any]]


def trains_as_alone(
    pool: Pool,
    folder: Path,
    config: TrainConfig,
    names: Collection[str] = (),
    *,
    axis: str = "parallel.dp_replicate",
    processes: int = 4,
) -> Rows:
    """Compare the rows of a run on several processes with those of a run without `axis`, in this process.

    folder: of the config; names: of entries, besides losses and norm. Returns the rows on the processes.
    """
    made = config.model_dump(mode="json")
    for said in pool.run(processes, jobs_train.trained, made):
        assert said["error"] == ""
    together, output = metrics(folder), folder / "alone" / "out"
    output.mkdir(parents=True)
    section, _, key = axis.partition(".")
    made[section][key], made["output"]["folder"] = 1, str(output)
    assert run(preflight(TrainConfig.model_validate(made))).number == config.train.last
    for row, alone in zip(together, metrics(folder / "alone"), strict=True):
        for name in {"loss", "held_out_loss", "grad_norm", *names} & row.keys():
            assert row[name] == pytest.approx(alone[name], rel=1e-4, abs=1e-6), name
    return together


def resumes_bit_for_bit(folder: Path, config: TrainConfig, names: Collection[str] = ("loss",)) -> None:
    """A run that has ended goes on from its checkpoint halfway: its weights and rows are those of before."""
    rows, steps = metrics(folder), config.train.last
    checkpoint(folder, steps).rename(folder / "before")
    run(preflight(config, str(checkpoint(folder, steps // 2))))
    assert_same_tensors(folder / "before", checkpoint(folder, steps))
    again = metrics(folder)
    for name in names:
        assert [row.get(name) for row in again] == [row.get(name) for row in rows], name
