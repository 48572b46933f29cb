"""The processes of a mesh in a table: who holds what, who talks to whom, and who reads which data."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

import numpy as np
from rich.table import Table

from penstock.parallel.mesh import BATCH, LOSS, MESH, Axes
from penstock.pipeline.build_plan import BuildPlan

SHOWN = 64  # processes; more lines would push what stands above off the screen


class Grid:
    """The processes of a mesh by their places on its axes: neighbours on the last axis come first.

    Args:
        ranks: of the pipeline
        axes: the other axes, without -1
    """

    def __init__(self, ranks: int, axes: Axes) -> None:
        self.sizes = {name: {"pp": ranks, **axes.sizes}[name] for name in MESH}
        shape = tuple(self.sizes.values())
        self._numbers = np.arange(np.prod(shape)).reshape(shape)

    def __len__(self) -> int:
        return int(self._numbers.size)

    def place(self, process: int) -> dict[str, int]:
        """The place of a process on each axis."""
        return dict(zip(MESH, map(int, np.unravel_index(process, self._numbers.shape)), strict=True))

    def along(self, process: int, axes: Collection[str]) -> list[int]:
        """The processes, itself among them, that differ from this one in the place on these axes only."""
        place = self.place(process)
        line = self._numbers[tuple(slice(None) if name in axes else place[name] for name in MESH)]
        return [int(number) for number in line.flatten()]


def mesh_table(plan: BuildPlan, axes: Axes, rows: int | None) -> Table:
    """A line for each process.

    Args:
        plan: of the pipeline
        axes: the mesh's other axes, without -1
        rows: of a whole batch, if each pipeline reads a range of them; None if they are divided by length
    """
    grid = Grid(plan.schedule.ranks, axes)
    long = [name for name in MESH if name == "pp" or grid.sizes[name] > 1]
    title = f"mesh of {len(grid)} processes: pp={plan.schedule.ranks} x {axes}"
    table = Table(title=title, title_justify="left", caption=_caption(axes), caption_justify="left")
    for name in ("process", *long):
        table.add_column(name, justify="right")
    for name in ("stages", "layers", "neighbours", "sums gradients with", "reads"):
        table.add_column(name, no_wrap=name == "reads")
    for process in range(min(len(grid), SHOWN)):
        place = grid.place(process)
        held = [stage for stage in plan.stages if stage.rank == place["pp"]]
        table.add_row(
            str(process),
            *(str(place[name]) for name in long),
            ", ".join(str(stage.stage) for stage in held),
            ", ".join(_span(stage.layers) if stage.layers else "none" for stage in held),
            _names(neighbours(plan, grid, process)),
            _names(summed_with(grid, process)),
            _reads(grid, process, rows),
        )
    if len(grid) > SHOWN:
        table.add_row("...", *[""] * len(long), f"and {len(grid) - SHOWN} more")
    return table


def neighbours(plan: BuildPlan, grid: Grid, process: int) -> list[int]:
    """The processes that it exchanges activations and their gradients with."""
    placement, rank = plan.schedule.placement, grid.place(process)["pp"]
    ranks: set[int] = set()
    for stage in placement.stages_of(rank):
        ranks |= set() if placement.is_first(stage) else {placement.rank_of[stage - 1]}
        ranks |= set() if placement.is_last(stage) else {placement.rank_of[stage + 1]}
    pipeline = grid.along(process, ("pp",))
    return [pipeline[other] for other in sorted(ranks - {rank})]


def summed_with(grid: Grid, process: int) -> list[int]:
    """The processes that hold the same stages and work on other data."""
    return [other for other in grid.along(process, LOSS) if other != process]


def part_of(grid: Grid, process: int) -> int:
    """The part of the batch that it works on: Pipeline.batch_part's number."""
    part, place = 0, grid.place(process)
    for name in BATCH:
        part = part * grid.sizes[name] + place[name]
    return part


def _reads(grid: Grid, process: int, rows: int | None) -> str:
    part, parts = part_of(grid, process), grid.sizes["dp_replicate"] * grid.sizes["dp_shard"]
    if rows is not None:
        numbers = np.array_split(range(rows), parts)[part]
        text = f"rows {_span(range(int(numbers[0]), int(numbers[-1]) + 1))}"
    else:
        text = f"part {part} of {parts}" if parts > 1 else "all rows"
    cp = grid.sizes["cp"]
    return f"{text}, part {grid.place(process)['cp']} of {cp} of each" if cp > 1 else text


def _span(numbers: range) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"


def _names(processes: Sequence[int]) -> str:
    """A few numbers in full; of many the first and the last with the step between."""
    if len(processes) <= 4:
        return ", ".join(map(str, processes)) or "nobody"
    steps = {after - before for before, after in pairwise(processes)}
    every = "" if steps == {1} else f" by {steps.pop()}" if len(steps) == 1 else f", {len(processes)} of them"
    return f"{processes[0]}-{processes[-1]}{every}"


def _caption(axes: Axes) -> str:
    notes = []
    if axes.shards > 1:
        notes.append(f"each holds 1/{axes.shards} of its stages' weights, and gathers the others'")
    if axes.ep > 1:
        notes.append(f"experts are split over groups of {axes.ep} of dp_shard x cp")
    if axes.tp > 1:
        notes.append("single matrices are split over tp")
    return "; ".join(notes)
