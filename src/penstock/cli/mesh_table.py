"""The processes of a mesh in a table: who holds what, who talks to whom, and who reads which data."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

import numpy as np
from rich.table import Table

from penstock.cli.shared import table
from penstock.parallel.mesh import LOSS, MESH, Axes
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
    words = ("stages", "layers", "neighbours", "sums gradients with", "reads")
    lines: list[tuple[object, ...]] = []
    for process in range(min(len(grid), SHOWN)):
        place = grid.place(process)
        held = [stage for stage in plan.stages if stage.rank == place["pp"]]
        lines.append((
            process,
            *(place[name] for name in long),
            ", ".join(str(stage.stage) for stage in held),
            ", ".join(_span(stage.layers) if stage.layers else "none" for stage in held),
            _names(_neighbours(plan, grid, process)),
            _names([other for other in grid.along(process, LOSS) if other != process]),
            _reads(grid, process, rows),
        ))  # fmt: skip
    if len(grid) > SHOWN:
        lines.append(("...", *[""] * len(long), f"and {len(grid) - SHOWN} more"))
    title = f"mesh of {len(grid)} processes: pp={plan.schedule.ranks} x {axes}"
    made = table(("process", *long, *words), lines, left=words, title=title, caption=_caption(axes))
    made.columns[-1].no_wrap = True
    return made


def _neighbours(plan: BuildPlan, grid: Grid, process: int) -> list[int]:
    """The processes that it exchanges activations and their gradients with."""
    placement, rank = plan.schedule.placement, grid.place(process)["pp"]
    stages = placement.stages_of(rank)
    before = [stage - 1 for stage in stages if not placement.is_first(stage)]
    behind = [stage + 1 for stage in stages if not placement.is_last(stage)]
    ranks = {placement.rank_of[stage] for stage in (*before, *behind)} - {rank}
    pipeline = grid.along(process, ("pp",))
    return [pipeline[other] for other in sorted(ranks)]


def _reads(grid: Grid, process: int, rows: int | None) -> str:
    """The part of the batch that it works on; its number is Pipeline.batch_part's."""
    place, sizes = grid.place(process), grid.sizes
    part = place["dp_replicate"] * sizes["dp_shard"] + place["dp_shard"]
    parts = sizes["dp_replicate"] * sizes["dp_shard"]
    if rows is not None:
        numbers = np.array_split(range(rows), parts)[part]
        text = f"rows {_span(range(int(numbers[0]), int(numbers[-1]) + 1))}"
    else:
        text = f"part {part} of {parts}" if parts > 1 else "all rows"
    return f"{text}, part {place['cp']} of {sizes['cp']} of each" if sizes["cp"] > 1 else text


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
