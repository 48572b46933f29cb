"""``penstock schedule compare --config``: the costs of a config's model are those of its dry run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import dry_run
from penstock.train.config.load import load_config
from penstock.train.preflight import dry_run as planned_run
from support.command import Command
from support.covering import some
from support.tiny import config_file


def one_f_one_b(penstock: Command, *options: object) -> dict[str, Any]:
    """The entry of 1F1B with one stage per rank."""
    code, out, err = penstock("schedule", "compare", *options, "--json")
    assert (code, err) == (0, "")
    entries = json.loads(out)["schedules"]
    return next(entry for entry in entries if entry["name"] == "1f1b" and not entry["options"])


@pytest.mark.parametrize("recomputed", some([None, "full", "selective"], "selective"))
def test_1f1b_is_what_the_dry_run_shows(tmp_path: Path, penstock: Command, recomputed: str | None) -> None:
    train = {"batch_size": 8, "activation_checkpointing": recomputed}
    file = config_file(tmp_path, pipeline={"microbatches": 4}, train=train)
    planned = planned_run(load_config(file))
    entry = one_f_one_b(penstock, "--config", file)
    assert entry["bubble"] == pytest.approx(dry_run.predicted_bubble(planned))
    most = max(rank.activations or 0 for rank in dry_run.memory(planned))
    assert entry["peak_memory"] * 2**30 == pytest.approx(most, abs=1)
    plain = one_f_one_b(penstock, "--ranks", 2, "--microbatches", 4)
    assert abs(entry["bubble"] - plain["bubble"]) > 0.001  # a model's stages differ


def test_the_command_line_changes_ranks_and_microbatches(tmp_path: Path, penstock: Command) -> None:
    options = ("--config", config_file(tmp_path), "--microbatches", 4, "--ranks", 1)
    data = json.loads(penstock("schedule", "compare", *options, "--json").out)
    assert (data["ranks"], data["microbatches"]) == (1, 4)
    shown = penstock("schedule", "compare", *options).out
    assert "times in 10^12 multiply-adds, memory of activations in GiB" in shown


def test_costs_that_are_not_the_models_are_refused(tmp_path: Path, penstock: Command) -> None:
    file = config_file(tmp_path, train={"activation_checkpointing": {"in_flight": [1, 1]}})
    code, _, err = penstock("schedule", "compare", "--config", file)
    assert (code, "depends on the schedule" in err) == (2, True)
    code, _, err = penstock("schedule", "compare", "--config", file, "--forward", 2)
    assert (code, "Leave out one of the two" in err) == (2, True)
    offloads = config_file(tmp_path, train={"activation_offloading": True})
    code, _, err = penstock("schedule", "compare", "--config", offloads)
    assert (code, "wait in host memory depends on the schedule" in err) == (2, True)
    code, _, err = penstock("schedule", "compare", "--ranks", 2)
    assert (code, "needs the number of microbatches" in err) == (2, True)
