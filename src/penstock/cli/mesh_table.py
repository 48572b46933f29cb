"""The processes of a mesh in a table: who holds what, who talks to whom, and who reads which data."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import islice, pairwise

import numpy as np
from rich.table import Table

from penstock.cli.shared import table
from penstock.parallel.axes import LOSS, MESH, Axes
from penstock.pipeline.build_plan import BuildPlan

SHOWN = 64  # processes; more lines would push what stands above off the screen


def mesh_table(plan: BuildPlan, axes: Axes, rows: int | None) -> Table:
    """A line for each process; neighbours on the mesh's last axis come first.

    Args:
        plan: of the pipeline
        axes: the mesh's other axes, without -1
        rows: of a whole batch, if each pipeline reads a range of them; None if they are divided by length
    """
    ranks = plan.schedule.ranks
    sizes = {name: {"pp": ranks, **axes.sizes}[name] for name in MESH}
    numbers = np.arange(ranks * axes.ranks_per_stage).reshape(*sizes.values())

    def along(place: dict[str, int], names: Collection[str]) -> list[int]:
        """The processes that differ from the one at `place` in the place on these axes only, and itself."""
        line = numbers[tuple(slice(None) if name in names else place[name] for name in MESH)]
        return [int(number) for number in line.flatten()]

    long = [name for name in MESH if name == "pp" or sizes[name] > 1]
    lines: list[tuple[object, ...]] = []
    for process, indices in enumerate(islice(np.ndindex(numbers.shape), SHOWN)):
        place = dict(zip(MESH, indices, strict=True))
        held = [stage for stage in plan.stages if stage.rank == place["pp"]]
        pipeline = along(place, ["pp"])
        lines.append((
            process,
            *(place[name] for name in long),
            ", ".join(str(stage.stage) for stage in held),
            ", ".join(_span(stage.layers) if stage.layers else "none" for stage in held),
            _names([pipeline[rank] for rank in _neighbours(plan, place["pp"])]),
            _names([other for other in along(place, LOSS) if other != process]),
            _reads(place, axes, rows),
        ))  # fmt: skip
    if numbers.size > SHOWN:
        lines.append(("...", *[""] * len(long), f"and {numbers.size - SHOWN} more"))
    words = ("stages", "layers", "neighbours", "sums gradients with", "reads")
    title = f"mesh of {numbers.size} processes: pp={ranks} x {axes}"
    made = table(("process", *long, *words), lines, left=words, title=title, caption=_caption(axes))
    made.columns[-1].no_wrap = True
    return made


def _neighbours(plan: BuildPlan, rank: int) -> list[int]:
    """The ranks of the pipeline that this one exchanges activations and their gradients with."""
    placement = plan.schedule.placement
    stages = placement.stages_of(rank)
    before = [stage - 1 for stage in stages if not placement.is_first(stage)]
    behind = [stage + 1 for stage in stages if not placement.is_last(stage)]
    return sorted({placement.rank_of[stage] for stage in (*before, *behind)} - {rank})


def _reads(place: dict[str, int], axes: Axes, rows: int | None) -> str:
    """The part of the batch that it works on; its number is Pipeline.batch_part's."""
    part, parts = place["dp_replicate"] * axes.dp_shard + place["dp_shard"], axes.batch_parts
    if rows is not None:
        numbers = np.array_split(range(rows), parts)[part]
        text = f"rows {_span(range(int(numbers[0]), int(numbers[-1]) + 1))}"
    else:
        text = f"part {part} of {parts}" if parts > 1 else "all rows"
    return f"{text}, part {place['cp']} of {axes.cp} of each" if axes.cp > 1 else text


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
