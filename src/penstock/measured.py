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

from penstock.models.balance import LayerCosts
from penstock.parts import Layers, StageFacts
from penstock.runtime import report
from penstock.runtime.executor import Executor
from penstock.runtime.memory import Sizes
from penstock.runtime.processes import Processes
from penstock.schedule import Costs, Timeline
from penstock.steps import Told

Times = dict[tuple[int, int], list[float]]  # by stage and layer, seconds of each call


def step_costs(told: Told, executors: Sequence[Executor], processes: Processes) -> Costs:
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
