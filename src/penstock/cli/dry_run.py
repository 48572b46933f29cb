"""What ``penstock train --dry-run`` shows: all that is known of a run before it runs."""

from __future__ import annotations

import re
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from penstock.cli.mesh_table import mesh_table
from penstock.schedule import Costs, render, simulate
from penstock.train.assemble import Prepared, largest_microbatch


def show(prepared: Prepared) -> None:
    """Print config, stages, mesh, schedule, predicted bubble and memory a rank."""
    console = Console(highlight=False)
    schedule = prepared.outline.schedule
    costs = stage_costs(prepared)
    predicted = simulate(schedule, Costs(forward=costs, input_grad=costs, weight_grad=costs))
    console.print(prepared.config.to_yaml(), markup=False, soft_wrap=True)
    console.print(_stages(prepared))
    console.print(_optimizers(prepared))
    if prepared.axes.beside > 1:
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
