"""``penstock train --dry-run``: everything that is known of a run before it runs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from penstock.cli.mesh_table import mesh_table
from penstock.cli.shared import table
from penstock.schedule import Costs, render, simulate
from penstock.train.optimizer import MOMENTS, OPTIMIZERS
from penstock.train.run import Prepared
from penstock.train.settings import largest_microbatch


def show(prepared: Prepared) -> None:
    """Print config, stages, optimizers, mesh, schedule, predicted bubble and memory of each rank."""
    console = Console(highlight=False)
    config, schedule = prepared.config, prepared.plan.schedule
    costs = stage_costs(prepared)
    predicted = simulate(schedule, Costs(forward=costs, input_grad=costs, weight_grad=costs))
    console.print(config.to_yaml(), markup=False, soft_wrap=True)
    console.print(_stages(prepared))
    console.print(_optimizers(prepared))
    if prepared.axes.ranks_per_stage > 1:
        rows = config.train.batch_size if config.data.packing == "stream" else None
        console.print(mesh_table(prepared.plan, prepared.axes, rows))
    console.print(render(schedule), markup=False, soft_wrap=True)
    proportion = "each stage taking time in proportion to its parameters"
    console.print(f"predicted bubble {predicted.bubble:.1%}, {proportion}\n")
    console.print(_memory(prepared))
    for note in prepared.notes:
        console.print(note, markup=False)


def _stages(prepared: Prepared) -> Table:
    rows = []
    for stage in prepared.plan.stages:
        layers = f"{stage.layers.start} to {stage.layers.stop - 1}" if stage.layers else "none"
        rows.append((stage.rank, stage.stage, layers, f"{stage.parameters:,}"))
    return table(("rank", "stage", "layers", "parameters"), rows, title="stages")


def stage_costs(prepared: Prepared) -> list[float]:
    """Each stage's time as a share of the longest: its parameters; the embedding, a look-up, takes none."""
    plan = prepared.plan
    costs = [float(stage.parameters) for stage in plan.stages]
    embedding = plan.source.model.get_input_embeddings().weight.numel()
    for stage in range(0, len(costs), plan.schedule.placement.depth):
        costs[stage] -= embedding
    return [cost / max(costs) for cost in costs]


class Trained(NamedTuple):
    """What an optimizer trains: parameters, entries in them, and their names without the layer's."""

    parameters: int
    entries: int
    names: tuple[str, ...]


def optimizers(prepared: Prepared) -> dict[str, Trained]:
    """What each optimizer trains of the whole model, by the optimizer's name."""
    model, layers = prepared.plan.source.model, re.escape(prepared.plan.chain.layers)
    trained = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    found = {}
    for kind in OPTIMIZERS[prepared.config.optimizer.name].shares:
        mine = [name for name in trained if prepared.kinds[name] == kind]
        short = dict.fromkeys(re.sub(rf"^{layers}\.\d+\.", "", name) for name in mine)
        if mine:
            found[kind] = Trained(len(mine), sum(trained[name] for name in mine), tuple(short))
    return found


def _optimizers(prepared: Prepared) -> Table:
    heads = ("optimizer", "parameters", "entries", "which, without the layer's name")
    rows = [
        (name, f"{trained.parameters:,}", f"{trained.entries:,}", ", ".join(trained.names))
        for name, trained in optimizers(prepared).items()
    ]
    return table(heads, rows, left=(heads[0], heads[-1]), title="optimizers")


class Memory(NamedTuple):
    """What each process of a rank holds, in bytes. Of sharded weights the first three are its shards.

    Attributes:
        gathered: unsharded weights and their gradients, during a step
        live: activations and buffers at their peak; None where only a run can show them
    """

    parameters: int
    gradients: int
    moments: int
    gathered: int
    live: int | None


def memory(prepared: Prepared) -> list[Memory]:
    """The memory of each rank of the pipeline."""
    plan, shards = prepared.plan, prepared.axes.shards
    sizes = prepared.auto.memory_costs(plan, largest_microbatch(prepared.config))
    peaks = None if sizes is None else simulate(plan.schedule, sizes).peak_memory
    needs = []
    for rank in range(plan.schedule.ranks):
        stages = [stage for stage in plan.stages if stage.rank == rank]
        weights = sum(stage.parameter_bytes for stage in stages)
        shard, live = -(-weights // shards), None if peaks is None else int(peaks[rank])
        moments = -(-sum(_moments(prepared, stage.parameter_names) for stage in stages) // shards)
        needs.append(Memory(shard, shard, moments, 2 * weights if shards > 1 else 0, live))
    return needs


def _moments(prepared: Prepared, names: Iterable[str]) -> int:
    """Bytes of what the optimizers keep of a stage's parameters; a weight under two names counts once."""
    model = prepared.plan.source.model
    distinct = {id(model.get_parameter(name)): name for name in names}.values()
    return sum(model.get_parameter(name).nbytes * len(MOMENTS[prepared.kinds[name]]) for name in distinct)


def _memory(prepared: Prepared) -> Table:
    axes, needs = prepared.axes, memory(prepared)
    title = "predicted memory a rank, MiB, without the framework's"
    if max(axes.tp, axes.ep) > 1:
        title += "; an upper bound, as what tp and ep split counts in full"
    gathered = ["gathered"] if any(need.gathered for need in needs) else []
    kinds = " and ".join(optimizers(prepared))
    heads = ("rank", "parameters", "gradients", kinds, *gathered, "live", "activations", "together")
    rows = []
    for rank, (need, peak) in enumerate(zip(needs, prepared.plan.proof.peak_live, strict=True)):
        *weights, live = need
        shown = weights if gathered else weights[:-1]
        activations, more = ("unknown", " and more") if live is None else (_mib(live), "")
        total = _mib(sum(weights) + (live or 0)) + more
        rows.append((rank, *map(_mib, shown), peak, activations, total))
    return table(heads, rows, title=title)


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f}"
