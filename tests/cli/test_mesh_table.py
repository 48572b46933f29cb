"""Who holds what, who talks to whom, and who reads what, on meshes of several axes."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from penstock import Axes
from penstock.cli.mesh_table import mesh_table
from penstock.pipeline.build_plan import BuildPlan
from penstock.train.run import preflight
from support.tiny import QWEN3, config


def build_plan(folder: Path, ranks: int = 2, schedule: str = "1f1b") -> BuildPlan:
    pipeline = {"ranks": ranks, "schedule": schedule, "microbatches": 2 * ranks}
    model = {**QWEN3, "num_hidden_layers": 4}
    return preflight(config(folder, model, {"pipeline": pipeline}, batch_size=8)).plan


def shown(table: Table) -> str:
    console = Console(width=200)
    with console.capture() as caught:
        console.print(table)
    return caught.get()


def test_the_table(tmp_path: Path) -> None:
    text = shown(mesh_table(build_plan(tmp_path), Axes(dp_shard=2, cp=2), 5))
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines()]
    rows = [row for row in cells if row[0].isdigit()]
    assert rows == [
        ["0", "0", "0", "0", "0", "0-1", "4", "1, 2, 3", "rows 0-2, part 0 of 2 of each"],
        ["1", "0", "0", "1", "0", "0-1", "5", "0, 2, 3", "rows 0-2, part 1 of 2 of each"],
        ["2", "0", "1", "0", "0", "0-1", "6", "0, 1, 3", "rows 3-4, part 0 of 2 of each"],
        ["3", "0", "1", "1", "0", "0-1", "7", "0, 1, 2", "rows 3-4, part 1 of 2 of each"],
        ["4", "1", "0", "0", "1", "2-3", "0", "5, 6, 7", "rows 0-2, part 0 of 2 of each"],
        ["5", "1", "0", "1", "1", "2-3", "1", "4, 6, 7", "rows 0-2, part 1 of 2 of each"],
        ["6", "1", "1", "0", "1", "2-3", "2", "4, 5, 7", "rows 3-4, part 0 of 2 of each"],
        ["7", "1", "1", "1", "1", "2-3", "3", "4, 5, 6", "rows 3-4, part 1 of 2 of each"],
    ]
    assert "each holds 1/4 of its stages' weights" in text


def columns(table: Table, *names: str) -> list[list[str]]:
    return [[str(cell) for cell in column.cells] for column in table.columns if column.header in names]


def test_ranks_of_tp_read_the_same_and_sum_nothing(tmp_path: Path) -> None:
    table = mesh_table(build_plan(tmp_path), Axes(dp_replicate=2, tp=2), None)
    neighbours, summed_with, reads = columns(table, "neighbours", "sums gradients with", "reads")
    assert reads == ["part 0 of 2", "part 0 of 2", "part 1 of 2", "part 1 of 2"] * 2
    assert (neighbours[3], summed_with[1]) == ("7", "3")


@pytest.mark.parametrize("schedule", ["1f1b", "dualpipe"])
def test_neighbours_follow_the_stages(tmp_path: Path, schedule: str) -> None:
    table = mesh_table(build_plan(tmp_path, 4, schedule), Axes(dp_shard=2), None)
    assert columns(table, "neighbours")[0][::2] == ["2", "0, 4", "2, 6", "4"]


def test_large_meshes_are_cut_short(tmp_path: Path) -> None:
    text = shown(mesh_table(build_plan(tmp_path), Axes(dp_shard=64), 64))
    assert "and 64 more" in text
    assert "1-63" in text
