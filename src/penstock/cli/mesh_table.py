"""The processes of a mesh in a table: who holds what, who talks to whom, and who reads which data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product

from rich.table import Table

from penstock.outline import Outline
from penstock.runtime.axes import MESH, Axes
from penstock.runtime.sums import BATCH, LOSS

SHOWN = 64  # processes; of more the table would hide what stands above it


@dataclass(frozen=True)
class Seat:
    """One process, and its place on each axis."""

    process: int
    place: dict[str, int]

    def apart(self, other: Seat) -> set[str]:
        """The axes on which the two stand at different places."""
        return {name for name, at in self.place.items() if other.place[name] != at}


def seats(ranks: int, axes: Axes) -> list[Seat]:
    """All processes in their order: as the mesh is laid out, neighbours on the last axis first."""
    sizes = {"pp": ranks, **axes.sizes}
    places = product(*(range(sizes[name]) for name in MESH))
    return [Seat(number, dict(zip(MESH, place, strict=True))) for number, place in enumerate(places)]


def mesh_table(outline: Outline, axes: Axes, rows: int | None) -> Table:
    """rows: of a whole batch, where each part is a run of them; None where they are dealt out by length"""
    ranks = outline.schedule.ranks
    everyone = seats(ranks, axes)
    long = [name for name in MESH if name == "pp" or axes.sizes[name] > 1]
    title = f"mesh of {len(everyone)} processes: pp={ranks} x {axes}"
    table = Table(title=title, title_justify="left", caption=_caption(axes), caption_justify="left")
    for name in ("process", *long):
        table.add_column(name, justify="right")
    for name in ("stages", "layers", "neighbours", "sums gradients with", "reads"):
        table.add_column(name, no_wrap=name == "reads")
    for seat in everyone[:SHOWN]:
        rank = seat.place["pp"]
        table.add_row(
            str(seat.process), *(str(seat.place[name]) for name in long),
            *_held(outline, rank), _names(neighbours(outline, everyone, seat)),
            _names(summed_with(everyone, seat)), _read(seat, axes, rows),
        )  # fmt: skip
    if len(everyone) > SHOWN:
        table.add_row("...", *[""] * len(long), f"and {len(everyone) - SHOWN} more")
    return table


def neighbours(outline: Outline, everyone: Sequence[Seat], seat: Seat) -> list[int]:
    """The processes of its pipeline that activations and their gradients come from, or go to."""
    placement, rank = outline.schedule.placement, seat.place["pp"]
    beside: set[int] = set()
    for stage in placement.stages_of(rank):
        beside |= set() if placement.is_first(stage) else {placement.rank_of[stage - 1]}
        beside |= set() if placement.is_last(stage) else {placement.rank_of[stage + 1]}
    own = (other for other in everyone if seat.apart(other) <= {"pp"})
    return [other.process for other in own if other.place["pp"] in beside - {rank}]


def summed_with(everyone: Sequence[Seat], seat: Seat) -> list[int]:
    """The processes that hold the same stages and work on other data."""
    return [other.process for other in everyone if other != seat and seat.apart(other) <= set(LOSS)]


def part_of(seat: Seat, axes: Axes) -> int:
    """Which part of the batch it works on, as Pipeline.batch_part has it."""
    part = 0
    for name in BATCH:
        part = part * axes.sizes[name] + seat.place[name]
    return part


def _read(seat: Seat, axes: Axes, rows: int | None) -> str:
    part, parts = part_of(seat, axes), axes.batches
    if rows is None:
        read = f"part {part} of {parts}" if parts > 1 else "all rows"
    else:
        small, larger = divmod(rows, parts)  # as numpy.array_split deals them
        first = part * small + min(part, larger)
        read = f"rows {_span(range(first, first + small + (part < larger)))}"
    return f"{read}, part {seat.place['cp']} of {axes.cp} of each" if axes.cp > 1 else read


def _held(outline: Outline, rank: int) -> tuple[str, str]:
    held = [stage for stage in outline.stages if stage.rank == rank]
    layers = ["none" if not stage.layers else _span(stage.layers) for stage in held]
    return ", ".join(str(stage.stage) for stage in held), ", ".join(layers)


def _span(numbers: range) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"


def _names(processes: Sequence[int]) -> str:
    """Numbers in words: each of a few, and of many the first and the last with the step between."""
    if len(processes) <= 4:
        return ", ".join(map(str, processes)) or "nobody"
    steps = {after - before for before, after in pairwise(processes)}
    every = "" if steps == {1} else f" by {steps.pop()}" if len(steps) == 1 else f", {len(processes)} of them"
    return f"{processes[0]}-{processes[-1]}{every}"


def _caption(axes: Axes) -> str:
    notes = []
    if axes.dp_shard * axes.cp > 1:
        notes.append(
            f"each holds 1/{axes.dp_shard * axes.cp} of its stages' weights, and gathers the others'"
        )
    if axes.ep > 1:
        notes.append(f"experts are spread over groups of {axes.ep} of dp_shard x cp")
    if axes.tp > 1:
        notes.append("single matrices are spread over tp")
    return "; ".join(notes)
