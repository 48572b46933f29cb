"""What each op takes, for simulation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from statistics import median

from penstock.errors import ConfigError
from penstock.schedule.ops import Kind
from penstock.schedule.timeline import Timeline

PerStage = float | Sequence[float]


@dataclass(frozen=True)
class Costs:
    """Durations in any one unit; each a number for all stages, or a sequence with one number a stage.

    forward, input_grad, weight_grad: what F takes; a whole backward B takes the sum of the last two
    communication: latency of an edge between two ranks; it occupies neither of them
    """

    forward: PerStage = 1.0
    input_grad: PerStage = 1.0
    weight_grad: PerStage = 1.0
    communication: float = 0.0

    def __post_init__(self) -> None:
        _check("communication", self.communication)

    def durations(self, kind: Kind, stages: int) -> list[float]:
        """What an op of `kind` takes on each of `stages` stages."""
        if kind == "F":
            return _per_stage("forward", self.forward, stages)
        input_grad = _per_stage("input_grad", self.input_grad, stages)
        weight_grad = _per_stage("weight_grad", self.weight_grad, stages)
        return [i + w for i, w in zip(input_grad, weight_grad, strict=True)]

    @classmethod
    def measured(cls, timeline: Timeline, communication: float = 0.0) -> Costs:
        """The median duration of each stage's ops in `timeline`; a backward counts whole as `input_grad`."""
        seen: dict[tuple[int, Kind], list[float]] = defaultdict(list)
        for span in timeline.spans:
            seen[span.op.stage, span.op.kind].append(span.end - span.start)
        stages = 1 + max(stage for stage, _ in seen)

        def medians(kind: Kind) -> list[float]:
            return [median(seen[stage, kind] or [0.0]) for stage in range(stages)]

        return cls(
            forward=medians("F"), input_grad=medians("B"), weight_grad=0.0, communication=communication
        )


def _per_stage(name: str, cost: PerStage, stages: int) -> list[float]:
    values = [float(cost)] * stages if isinstance(cost, int | float) else [float(c) for c in cost]
    if len(values) != stages:
        raise ConfigError(
            f"Costs({name}=...) with {len(values)} numbers",
            f"the schedule has {stages} stages, and each takes one",
            f"Give one number for all stages, or {stages} of them",
        )
    for value in values:
        _check(name, value)
    return values


def _check(name: str, value: float) -> None:
    if not 0 <= value < inf:  # also where it is not a number
        raise ConfigError(f"Costs({name}={value})", "a duration is finite and not negative", "Give 0 or more")
