"""Who holds what, who talks to whom, and who reads what, on meshes of several axes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from penstock import Axes
from penstock.cli.mesh_table import Grid, mesh_table, neighbours, part_of, summed_with
from penstock.pipeline.build_plan import BuildPlan
from penstock.train.run import preflight
from support.tiny import QWEN3, config, config_file

Command = Callable[..., tuple[int, str, str]]


def build_plan(folder: Path, ranks: int = 2, schedule: str = "1f1b") -> BuildPlan:
    pipeline = {"ranks": ranks, "schedule": schedule, "microbatches": 2 * ranks}
    model = {**QWEN3, "num_hidden_layers": 4}
    return preflight(config(folder, model, {"pipeline": pipeline}, batch_size=8)).plan


def shown(table: Any) -> str:
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
    assert "part 1 of 2" in shown(mesh_table(build_plan(tmp_path), Axes(dp_replicate=2), None))


def test_ranks_of_tp_read_the_same_and_sum_nothing(tmp_path: Path) -> None:
    axes = Axes(dp_replicate=2, tp=2)
    grid = Grid(2, axes)
    assert [part_of(grid, process) for process in range(8)] == [0, 0, 1, 1] * 2
    assert summed_with(grid, 1) == [3]
    assert neighbours(build_plan(tmp_path), grid, 3) == [7]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("1f1b", [[2], [0, 4], [2, 6], [4]]), ("dualpipe", [[2], [0, 4], [2, 6], [4]])],
)
def test_neighbours_follow_the_stages(tmp_path: Path, schedule: str, expected: list[list[int]]) -> None:
    grid, plan = Grid(4, Axes(dp_shard=2)), build_plan(tmp_path, 4, schedule)
    assert [neighbours(plan, grid, process) for process in range(0, 8, 2)] == expected


def test_large_meshes_are_cut_short(tmp_path: Path) -> None:
    text = shown(mesh_table(build_plan(tmp_path), Axes(dp_shard=64), 64))
    assert "and 64 more" in text
    assert "1-63" in text


def test_a_dry_run_shows_it_and_starts_nothing(tmp_path: Path, penstock: Command) -> None:
    _, out, _ = penstock("train", config_file(tmp_path), "--dry-run", "parallel.dp_shard=2")
    for part in ("mesh of 4 processes: pp=2 x dp_shard=2", "rows 2-3", "gathered"):
        assert part in out
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["config.yaml", "text"]
