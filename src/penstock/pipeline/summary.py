"""What was measured of a pipeline, in the form in which something else is told by it."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import nn

from penstock.models.partition import LayerCosts
from penstock.pipeline.built import Layers, StageFacts
from penstock.pipeline.step import StepRecord
from penstock.runtime import step_report as report
from penstock.runtime.executor import Executor
from penstock.runtime.memory import Held, Sizes
from penstock.runtime.transport.groups import Processes
from penstock.schedule import Costs, Schedule, Timeline

Times = dict[tuple[int, int], list[float]]  # by stage and layer, seconds of each call


def step_costs(told: StepRecord, executors: Sequence[Executor], processes: Processes) -> Costs:
    """What a step took and held: the median time of each stage's ops, the bytes of each stage and microbatch.

    Collective.
    """
    schedule = told[0]
    mine = [[*place, *sizes] for executor in executors for place, sizes in executor.ops.ledger.sizes.items()]
    known = {(stage, number): Sizes(*sizes) for part in processes.gather(mine)
             for stage, number, *sizes in part}  # fmt: skip
    none = Sizes(0, 0, 0, 0)  # of a copy of the model that the microbatch does not go through
    of = [[known.get((stage, number), none) for number in range(schedule.microbatches)]
          for stage in range(schedule.stages)]  # fmt: skip
    return replace(
        Costs.measured(report.measured(*told)),
        activation=[[sizes.activation for sizes in row] for row in of],
        sent=[[sizes.sent for sizes in row] for row in of],
        buffer=[[sizes.buffer for sizes in row] for row in of],
        bytes=[[sizes.buffer for sizes in row] for row in of],
        held_for_weight=[[sizes.held_for_weight for sizes in row] for row in of],
    )


def layer_costs(
    step: Callable[[], Timeline],
    repeats: int,
    layers: Layers,
    info: Sequence[StageFacts],
    device: torch.device,
    processes: Processes,
) -> LayerCosts:
    """Seconds that each layer takes in a microbatch's forward and backward, over `repeats` steps. Collective.

    Each layer's forward is timed by itself, and the stage's backward is shared out as its forward is. What a
    first stage needs besides is the embedding's, what a last one does the head's; all of it the head's where
    there is one stage.
    """
    step()  # which compiles, and finds out what is new to it
    with timed(layers, device) as times:
        costs = [Costs.measured(step()) for _ in range(repeats)]
    mine = [(*place, median(seconds)) for place, seconds in times.items()]
    forward: dict[int, dict[int, float]] = defaultdict(dict)
    for stage, number, seconds in (entry for process in processes.gather(mine) for entry in process):
        forward[stage][number] = seconds
    found: dict[int, float] = {}
    rests = []
    depth = info[0].info.stages
    for stage in range(depth):
        one = _median(costs, stage, "forward")
        whole = one + _median(costs, stage, "input_grad") + _median(costs, stage, "weight_grad")
        scale = whole / max(one, sum(forward[stage].values()))
        found |= {number: seconds * scale for number, seconds in forward[stage].items()}
        rests.append(whole - scale * sum(forward[stage].values()))
    ordered = [found[number] for number in sorted(found)]
    return LayerCosts(ordered, embedding=rests[0] if depth > 1 else 0.0, head=rests[-1])


def _median(costs: Sequence[Costs], stage: int, name: str) -> float:
    return median([float(getattr(of, name)[stage]) for of in costs])


@contextmanager
def timed(layers: Layers, device: torch.device) -> Iterator[Times]:
    """Each call of a layer is timed. Around all that the call does, or what is compiled would be so anew."""
    times: Times = defaultdict(list)
    before = {id(layer): (layer, type(layer)) for held in layers.values() for _, layer in held}
    for stage, held in layers.items():
        for number, layer in held:
            layer.__class__ = _timed(before[id(layer)][1], times[stage, number], device)
    try:
        yield times
    finally:
        for layer, own in before.values():
            layer.__class__ = own


def _timed(own: type[nn.Module], times: list[float], device: torch.device) -> type[nn.Module]:
    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        began = now()
        try:
            return own.__call__(self, *args, **kwargs)
        finally:  # a stage may end with its last layer, by an exception
            times.append(now() - began)

    return type(own.__name__, (own,), {"__module__": own.__module__, "__call__": call})


# ---- A pipeline in one table of plain text.


_HEAD = ("stage", "rank", "layers", "parameters", "memory", "time")


def summary(
    schedule: Schedule,
    info: Sequence[StageFacts],
    weights: int,
    memory: Sequence[Held] | None = None,
    timeline: Timeline | None = None,
) -> str:
    """A line for each stage. memory, by rank, and timeline: of a step, None before the first.

    weights: how many parameters there are, one that several stages hold (of copies of the model, or tied)
        counted once
    memory: of all of a rank's stages, shown beside its first: weights, gradients and the most that the step
        held; before a step without the last
    time: the stage's share of the time in which all ranks computed
    """
    times = _times(timeline, len(info))
    rows = [_HEAD]
    seen: set[int] = set()
    for stage, facts in enumerate(info):
        held = "" if facts.rank in seen else _memory(facts.rank, info, memory)
        seen.add(facts.rank)
        share = "" if times is None else f"{times[stage] / (sum(times) or 1):.1%}"
        rows.append(
            (str(stage), str(facts.rank), _ranges(facts.layers), f"{facts.parameters:,}", held, share)
        )
    rows.append(("all", str(schedule.ranks), "", f"{weights:,}", "", ""))
    shared = sum(facts.parameters for facts in info) > weights
    return "\n".join([_title(schedule, timeline), *_aligned(rows), *_legend(timeline is not None, shared)])


def _title(schedule: Schedule, timeline: Timeline | None) -> str:
    stages = f"{schedule.stages} stages on {schedule.ranks} ranks"
    said = f"{schedule.name}, {stages}, {schedule.microbatches} microbatches"
    if timeline is None:
        return said
    return f"{said}; last step {timeline.makespan:.3g} s, bubble {timeline.bubble:.1%}"


def _legend(measured: bool, shared: bool) -> list[str]:
    known = "weights, gradients and the most that the last step held"
    unknown = "weights and gradients; more is known after a step"
    lines = [f"memory: a rank's {known if measured else unknown}"]
    return [*lines, "all: a weight that several stages hold is counted once"] if shared else lines


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
    """In the largest unit that leaves a whole number: 3.2 MiB."""
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
    """Numbers to the right, with a rule under the head and above the sum."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = [[cell.rjust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    lines = ["  ".join(row).rstrip() for row in cells]
    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    return [lines[0], rule, *lines[1:-1], rule, lines[-1]]
