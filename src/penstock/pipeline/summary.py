"""A pipeline's measurements: costs of ops and layers for simulate and balance, and a table as text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import nn

from penstock.models.split.balanced_split import LayerCosts
from penstock.pipeline.building.stages import LayersByStage, StageFacts
from penstock.pipeline.steps.step import StepRecord
from penstock.runtime import step_report as report
from penstock.runtime.around import around, undo
from penstock.runtime.device import stream
from penstock.runtime.device.memory import Held, MicrobatchBytes
from penstock.runtime.device.stream import Time
from penstock.runtime.executor import Executor
from penstock.runtime.ranks import Ranks
from penstock.schedule import Costs, Schedule, Timeline

LayerTimes = dict[tuple[int, int], list[tuple[Time, Time]]]  # by stage and layer, start and end of each call


def step_costs(
    last: StepRecord, executors: Sequence[Executor], processes: Ranks, offload_ahead: int = 1
) -> Costs:
    """Costs of a step: median seconds of each stage's ops, bytes of each stage and microbatch. Collective."""
    schedule = last[0]
    local = [[*key, *sizes] for executor in executors for key, sizes in executor.memory.ledger.sizes.items()]
    everyone = (entry for process in processes.gather(local) for entry in process)
    known = {(stage, index): MicrobatchBytes(*sizes) for stage, index, *sizes in everyone}
    none = MicrobatchBytes(0, 0, 0, 0)  # on a copy of the model that the microbatch does not go through
    table = [
        [known.get((stage, index), none) for index in range(schedule.microbatches)]
        for stage in range(schedule.stages)
    ]
    sizes_of = {
        name: [[getattr(sizes, name) for sizes in row] for row in table] for name in MicrobatchBytes._fields
    }
    measured = replace(Costs.measured(report.measured(*last)), bytes=sizes_of["buffer"])
    return replace(measured, offload_ahead=offload_ahead, **sizes_of)  # type: ignore[arg-type]


def layer_costs(
    step: Callable[[], Timeline],
    repeats: int,
    layers: LayersByStage,
    info: Sequence[StageFacts],
    device: torch.device,
    processes: Ranks,
) -> LayerCosts:
    """Seconds of each layer in a microbatch's forward and backward, over `repeats` steps. Collective.

    Each layer's forward is timed, and the stage's backward is divided in proportion. The rest of the first
    stage's time goes to the embedding, that of the last one to the head; with one stage, all to the head.

    step: runs a step that measures the device
    """
    with timed(layers, device) as times:
        costs = [Costs.measured(step()) for _ in range(repeats)]
    local = [(*where, median([stream.seconds(*call) for call in calls])) for where, calls in times.items()]
    forward: dict[int, dict[int, float]] = defaultdict(dict)
    for stage, index, seconds in (entry for process in processes.gather(local) for entry in process):
        forward[stage][index] = seconds
    layer_seconds: dict[int, float] = {}
    rests = []
    depth = info[0].info.stages
    for stage in range(depth):
        one = _median(costs, stage, "forward")
        both = one + _median(costs, stage, "input_grad") + _median(costs, stage, "weight_grad")
        scale = both / max(one, sum(forward[stage].values()))
        layer_seconds |= {layer: seconds * scale for layer, seconds in forward[stage].items()}
        rests.append(max(0.0, both - scale * sum(forward[stage].values())))  # rounding
    ordered = [layer_seconds[layer] for layer in sorted(layer_seconds)]
    return LayerCosts(ordered, embedding=rests[0] if depth > 1 else 0.0, head=rests[-1])


def _median(costs: Sequence[Costs], stage: int, name: str) -> float:
    return median([float(getattr(step, name)[stage]) for step in costs])


@contextmanager
def timed(layers: LayersByStage, device: torch.device) -> Iterator[LayerTimes]:
    """Time each call of a layer, from outside: a hook inside would make a compiled layer compile anew."""
    times: LayerTimes = defaultdict(list)
    now = stream.stream_of(device).now  # of the compute stream, as messages use others
    timed_layers = dict[int, nn.Module]()
    for stage, of_stage in layers.items():
        for index, layer in of_stage:
            around(layer, __call__=_timed)
            vars(layer)["_timing"] = now, times[stage, index]
            timed_layers[id(layer)] = layer
    try:
        yield times
    finally:
        for layer in timed_layers.values():
            undo(layer, _timed)
            del vars(layer)["_timing"]


def _timed(plain: Callable[..., Any]) -> Callable[..., Any]:
    def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
        now, times = layer._timing
        began = now()
        try:
            return plain(layer, *args, **kwargs)
        finally:  # a stage may leave its last layer by an exception
            times.append((began, now()))

    return call


# ---- a pipeline in one table of plain text


_HEAD = ("stage", "rank", "layers", "parameters", "memory", "time")


def summary(
    schedule: Schedule,
    info: Sequence[StageFacts],
    weights: int,
    memory: Sequence[Held] | None = None,
    timeline: Timeline | None = None,
    carrier: str = "",
    balances: bool = False,
    on_gpu: bool = False,
) -> str:
    """A line for each stage: its rank, layers, parameters, memory, and share of all ranks' compute time.

    weights: number of parameters; a parameter with copies on several stages (copies of the model, tied
        weights) counts once
    memory, timeline: by rank, and of the last step; None before the first. A rank's memory is shown at its
        first stage: weights, gradients and, after a step, the peak of the step.
    carrier: of messages between processes; empty for one process
    balances: whether routers have an auxiliary loss
    on_gpu: whether the stages run on GPUs, for which a host may be the limit
    """
    times = _times(timeline, len(info))
    rows = [_HEAD]
    seen: set[int] = set()
    for stage, facts in enumerate(info):
        shown = "" if facts.rank in seen else _memory(facts.rank, info, memory)
        seen.add(facts.rank)
        share = "" if times is None else f"{times[stage] / (sum(times) or 1):.1%}"
        rows.append(
            (str(stage), str(facts.rank), _ranges(facts.layers), f"{facts.parameters:,}", shown, share)
        )
    rows.append(("all", str(schedule.ranks), "", f"{weights:,}", "", ""))
    shared = sum(facts.parameters for facts in info) > weights
    legend = _legend(timeline is not None, shared, carrier)
    if on_gpu and timeline is not None and timeline.host_share is None:
        legend.append("host: a step inside pipe.measuring_device() finds out how far it is the limit")
    if balances:
        legend.append(
            "loss: the routers' auxiliary loss is each microbatch's own, so it changes with their number"
        )
    return "\n".join([_title(schedule, timeline), *_aligned(rows), *legend])


def _title(schedule: Schedule, timeline: Timeline | None) -> str:
    stages = f"{schedule.stages} stages on {schedule.ranks} ranks"
    title = f"{schedule.name}, {stages}, {schedule.microbatches} microbatches"
    if timeline is None:
        return title
    host = timeline.host_share
    limit = "" if host is None else f", the host is the limit: {host:.1%}"
    return f"{title}; last step {timeline.makespan:.3g} s, bubble {timeline.bubble:.1%}{limit}"


def _legend(measured: bool, shared: bool, carrier: str) -> list[str]:
    known = "weights, gradients and the most that the last step held"
    unknown = "weights and gradients; more is known after a step"
    lines = [f"memory: a rank's {known if measured else unknown}"]
    if shared:
        lines.append("all: a weight that several stages hold is counted once")
    if carrier:
        lines.append(f"messages between ranks: {carrier}")
    return lines


def _times(timeline: Timeline | None, stages: int) -> list[float] | None:
    if timeline is None:
        return None
    times = [0.0] * stages
    for span in timeline.spans:
        times[span.op.stage] += span.end - span.start
    return times


def _memory(rank: int, info: Sequence[StageFacts], memory: Sequence[Held] | None) -> str:
    fixed = sum(facts.bytes + facts.gradient_bytes for facts in info if facts.rank == rank)
    return size(fixed if memory is None else fixed + memory[rank].total)


def size(nbytes: float) -> str:
    """Bytes as text: 3.2 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.1f} {unit}" if unit != "B" else f"{nbytes:.0f} B"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def _ranges(numbers: Sequence[int]) -> str:
    """0-3, or 0, 2, 4-6 where there are gaps; - for none."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs) or "-"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Right-aligned columns, a rule under the head and above the total."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = [[cell.rjust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    lines = ["  ".join(row).rstrip() for row in cells]
    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    return [lines[0], rule, *lines[1:-1], rule, lines[-1]]
