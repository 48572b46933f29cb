"""What ``penstock train --dry-run`` shows: all that is known of a run before it runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from penstock.parallel.mesh import BATCH, LOSS, MESH, Axes
from penstock.pipeline.build_plan import BuildPlan
from penstock.schedule import Costs, render, simulate
from penstock.train.run import Prepared, largest_microbatch

# ---- The processes of a mesh in a table: who holds what, who talks to whom, and who reads which data.


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


def mesh_table(outline: BuildPlan, axes: Axes, rows: int | None) -> Table:
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


def neighbours(outline: BuildPlan, everyone: Sequence[Seat], seat: Seat) -> list[int]:
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
    part, parts = part_of(seat, axes), axes.batch_parts
    if rows is None:
        read = f"part {part} of {parts}" if parts > 1 else "all rows"
    else:
        small, larger = divmod(rows, parts)  # as numpy.array_split deals them
        first = part * small + min(part, larger)
        read = f"rows {_span(range(first, first + small + (part < larger)))}"
    return f"{read}, part {seat.place['cp']} of {axes.cp} of each" if axes.cp > 1 else read


def _held(outline: BuildPlan, rank: int) -> tuple[str, str]:
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


def show(prepared: Prepared) -> None:
    """Print config, stages, mesh, schedule, predicted bubble and memory a rank."""
    console = Console(highlight=False)
    schedule = prepared.outline.schedule
    costs = stage_costs(prepared)
    predicted = simulate(schedule, Costs(forward=costs, input_grad=costs, weight_grad=costs))
    console.print(prepared.config.to_yaml(), markup=False, soft_wrap=True)
    console.print(_stages(prepared))
    console.print(_optimizers(prepared))
    if prepared.axes.ranks_per_stage > 1:
        rows = prepared.config.train.batch_size if prepared.config.data.packing == "stream" else None
        console.print(mesh_table(prepared.outline, prepared.axes, rows))
    console.print(render(schedule), markup=False, soft_wrap=True)
    console.print(
        f"predicted bubble {predicted.bubble:.1%}, each stage taking time in proportion to its parameters\n"
    )
    console.print(_memory(prepared))
    for note in prepared.notes:
        console.print(note, markup=False)


def stage_costs(prepared: Prepared) -> list[float]:
    """A stage's forward: its parameters but the embedding's, a look-up, as a share of the largest."""
    stages = prepared.outline.stages
    costs = [float(stage.parameters) for stage in stages]
    embedding = prepared.outline.source.model.get_input_embeddings().weight.numel()
    for stage in range(0, len(stages), prepared.outline.schedule.placement.depth):
        costs[stage] -= embedding
    return [cost / max(costs) for cost in costs]


class Memory(NamedTuple):
    """What each process of a rank holds, in bytes. Where weights are spread, the first three are its shards.

    gathered: whole weights and their gradients, while a step runs; live: activations with buffers at their
        most, None where only a run can tell
    """

    parameters: int
    gradients: int
    moments: int
    gathered: int
    live: int | None


def memory(prepared: Prepared) -> list[Memory]:
    """By rank of the pipeline."""
    outline, axes = prepared.outline, prepared.axes
    shards = axes.shards
    sizes = prepared.auto.memory_costs(outline, largest_microbatch(prepared.config))
    held = None if sizes is None else simulate(outline.schedule, sizes).peak_memory
    parameters = dict(outline.source.model.named_parameters(remove_duplicate=False))
    needs = []
    for rank in range(outline.schedule.ranks):
        stages = [stage for stage in outline.stages if stage.rank == rank]
        weights = sum(stage.parameter_bytes for stage in stages)
        once = sum(parameters[n].nbytes for stage in stages for n in stage.parameter_names & prepared.muons)
        own, live = -(-weights // shards), None if held is None else int(held[rank])
        moments = -(-(2 * weights - once) // shards)  # of Muon's there is one
        needs.append(Memory(own, own, moments, 2 * weights if shards > 1 else 0, live))
    return needs


class Trained(NamedTuple):
    """What an optimizer trains: parameters, entries in them, and their names without the layer's."""

    parameters: int
    entries: int
    names: tuple[str, ...]


def optimizers(prepared: Prepared) -> dict[str, Trained]:
    """By the optimizer's name, over the whole model."""
    model, layers = prepared.outline.source.model, re.escape(prepared.outline.chain.layers)
    by: dict[str, list[tuple[str, int]]] = {"Muon": [], "AdamW": []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            short = re.sub(rf"^{layers}\.\d+\.", "", name)
            by["Muon" if name in prepared.muons else "AdamW"].append((short, parameter.numel()))
    return {
        kind: Trained(len(found), sum(size for _, size in found), tuple(dict.fromkeys(n for n, _ in found)))
        for kind, found in by.items()
        if found
    }


def _stages(prepared: Prepared) -> Table:
    table = Table(title="stages", title_justify="left")
    for name in ("rank", "stage", "layers", "parameters"):
        table.add_column(name, justify="right")
    for stage in prepared.outline.stages:
        layers = f"{stage.layers.start} to {stage.layers.stop - 1}" if stage.layers else "none"
        table.add_row(str(stage.rank), str(stage.stage), layers, f"{stage.parameters:,}")
    return table


def _optimizers(prepared: Prepared) -> Table:
    table = Table(title="optimizers", title_justify="left")
    for name in ("optimizer", "parameters", "entries"):
        table.add_column(name, justify="left" if name == "optimizer" else "right")
    table.add_column("which, without the layer's name")
    for name, trained in optimizers(prepared).items():
        table.add_row(name, f"{trained.parameters:,}", f"{trained.entries:,}", ", ".join(trained.names))
    return table


def _memory(prepared: Prepared) -> Table:
    title, axes = "predicted memory a rank, MiB, without the framework's own", prepared.axes
    if max(axes.tp, axes.ep) > 1:
        title += "; at most, as what tp and ep share out is counted whole"
    table = Table(title=title, title_justify="left")
    needs = memory(prepared)
    gathered = ["gathered"] if any(need.gathered for need in needs) else []
    kinds = " and ".join(optimizers(prepared))
    for name in ("rank", "parameters", "gradients", kinds, *gathered, "live", "activations", "together"):
        table.add_column(name, justify="right")
    peaks = prepared.outline.proof.peak_live
    for rank, need in enumerate(needs):
        *weights, live = need
        shown = weights if gathered else weights[:-1]
        table.add_row(
            str(rank), *map(_mib, shown), str(peaks[rank]),
            "unknown" if live is None else _mib(live),
            _mib(sum(weights) + (live or 0)) + (" and more" if live is None else ""),
        )  # fmt: skip
    return table


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f}"
