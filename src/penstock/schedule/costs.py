"""What each op takes and holds, for simulation and search."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median
from typing import TypeGuard

from penstock.errors import ConfigError
from penstock.schedule.ops import Kind, Op, Pair, Placement
from penstock.schedule.timeline import Timeline

# for all stages; or one for each stage, which is one for all its microbatches or one for each
Cost = float | Sequence[float | Sequence[float]]
Row = list[float]  # one number a microbatch

# those of the costs that differ between stages
COSTS = ("forward", "input_grad", "weight_grad", "bytes", "activation", "held_for_weight", "buffer", "sent",
         "held_in_backward", "exchange", "exchange_in_backward")  # fmt: skip
_OTHERWISE = {"held_for_weight": "activation", "sent": "buffer", "held_in_backward": "activation",
              "exchange_in_backward": "exchange"}  # fmt: skip


@dataclass(frozen=True)
class Costs:
    """Durations and sizes in any one unit each: a number, a number a stage, or a row of microbatches a stage.

    forward, input_grad, weight_grad: what F, I and W take; a whole backward B takes the sum of I and W
    communication: latency of an edge between two ranks; it occupies neither of them
    bytes: what crosses the edge behind each stage (and comes back as its gradient); with `bandwidth`, bytes a
        unit of time, an edge takes ``communication + bytes / bandwidth``
    activation: what a rank holds from the start of F to the end of I or B
    held_for_weight: what it holds from then to the end of W: some of the activation, and gradients;
        None: as much as the activation
    buffer: what one message over the edge behind each stage holds, in the unit of `activation`, its gradient
        as much. The receiver holds it from the post, `penstock.schedule.order` says when, until the op that
        takes it: F makes it part of its activation, I and B let go of it at their end. The sender holds it
        from its op's end until it has arrived; a runtime that notices later holds it longer
    sent: what the sender of a forward result holds meanwhile: less than `buffer`, down to 0, where the graph
        keeps the result anyway; None: as much as the buffer
    held_in_backward: what it holds while I or B runs: more than the activation where the forward is run
        again; None: as much as the activation
    exchange: what of F is spent waiting for other ranks within the op, as by a mixture whose tokens travel to
        their experts. Where it is above 0 overlapped pairs run side by side, and one op's waits are hidden by
        what the other one computes: as far as they can be, so that a pair really takes as long at least
    exchange_in_backward: what of B or I is; None: as much as of F
    """

    forward: Cost = 1.0
    input_grad: Cost = 1.0
    weight_grad: Cost = 1.0
    communication: float = 0.0
    bytes: Cost = 0.0
    bandwidth: float | None = None
    activation: Cost = 1.0
    held_for_weight: Cost | None = None
    buffer: Cost = 0.0
    sent: Cost | None = None
    held_in_backward: Cost | None = None
    exchange: Cost = 0.0
    exchange_in_backward: Cost | None = None

    def __post_init__(self) -> None:
        _check("communication", self.communication)
        if self.bandwidth is not None and not (_is_number(self.bandwidth) and self.bandwidth > 0):
            rule = "it divides bytes, and is a number above 0"
            raise ConfigError(f"Costs(bandwidth={self.bandwidth!r})", rule, "Give bytes a unit of time")
        for name in COSTS:
            _check_form(name, getattr(self, name))

    @property
    def counts_buffers(self) -> bool:
        """Whether what is on its way holds anything."""
        return any(map(_is_something, (self.buffer, self.sent)))

    @property
    def overlaps(self) -> bool:
        """Whether there is anything that a pair could hide."""
        return any(map(_is_something, (self.exchange, self.exchange_in_backward)))

    def rows(self, name: str, placement: Placement, microbatches: int) -> list[Row]:
        """The cost called `name` by stage and microbatch; copies of a stage cost alike.

        Raises ConfigError where the sizes do not fit.
        """
        stages, depth = placement.stages, placement.depth
        cost: Cost | None = getattr(self, name)
        if cost is None:
            return self.rows(_OTHERWISE[name], placement, microbatches)
        if isinstance(cost, int | float):
            return [[float(cost)] * microbatches for _ in range(stages)]
        if len(cost) not in (depth, stages):
            raise ConfigError(
                f"Costs({name}=...) with {len(cost)} numbers",
                f"the schedule has {depth} stages, and each takes one",
                f"Give one number for all stages, or {depth} of them",
            )
        return [_row(f"{name}[{s}]", cost[s % len(cost)], microbatches) for s in range(stages)]

    def durations(self, kind: Kind, placement: Placement, microbatches: int) -> list[Row]:
        """What an op of `kind` takes, by stage and microbatch."""
        if kind != "B":
            name = {"F": "forward", "I": "input_grad", "W": "weight_grad"}[kind]
            return self.rows(name, placement, microbatches)
        parts = (self.durations("I", placement, microbatches), self.durations("W", placement, microbatches))
        return [[i + w for i, w in zip(*rows, strict=True)] for rows in zip(*parts, strict=True)]

    def side_by_side(self, placement: Placement, microbatches: int) -> Callable[[Pair], float]:
        """What a pair takes whose ops begin together: what both compute, or one op alone if that is longer.

        Raises ConfigError where an op would take less than its exchange.
        """
        forward = self.rows("exchange", placement, microbatches)
        backward = self.rows("exchange_in_backward", placement, microbatches)
        waits: dict[Kind, list[Row]] = {"F": forward, "B": backward, "I": backward}
        durations = {kind: self.durations(kind, placement, microbatches) for kind in waits}

        def parts(op: Op) -> tuple[float, float]:
            """All of it, and what it waits."""
            stage, kind, microbatch = op
            whole, wait = durations[kind][stage][microbatch], waits[kind][stage][microbatch]
            if wait > whole:
                rule = f"what {op} waits within itself, {wait:g}, is a part of what it takes, {whole:g}"
                raise ConfigError(f"Costs(exchange={self.exchange!r})", rule, "Give as much at most")
            return whole, wait

        def takes(pair: Pair) -> float:
            (ahead, hidden), (behind, also_hidden) = map(parts, pair)
            return max(ahead, behind, ahead - hidden + behind - also_hidden)

        return takes

    def delays(self, placement: Placement, microbatches: int) -> list[Row]:
        """What the edge behind each stage takes, by microbatch, where it joins two ranks."""
        if self.bandwidth is None:
            return [[self.communication] * microbatches for _ in range(placement.stages)]
        sizes = self.rows("bytes", placement, microbatches)
        return [[self.communication + size / self.bandwidth for size in row] for row in sizes]

    @classmethod
    def measured(cls, timeline: Timeline, communication: float = 0.0) -> Costs:
        """The median duration of each stage's ops in `timeline`.

        Where no backward of a stage is split, its whole ones count as `input_grad`. An op that ran beside
        another took longer for it, and counts only where none of its stage and kind ran alone. A timeline
        does not tell what of an op is `exchange`: give it with `dataclasses.replace`, or pairs run one after
        the other on paper.
        """
        beside = timeline.side_by_side
        seen: dict[tuple[int, Kind], list[float]] = defaultdict(list)
        alone: dict[tuple[int, Kind], list[float]] = defaultdict(list)
        for span in timeline.spans:
            seen[span.op.stage, span.op.kind].append(span.end - span.start)
            if span.op not in beside:
                alone[span.op.stage, span.op.kind].append(span.end - span.start)
        if not seen:
            raise ConfigError("a timeline without ops", "costs are measured from ops", "Give one of a step")
        stages = 1 + max(stage for stage, _ in seen)
        seen.update(alone)

        def medians(kind: Kind, otherwise: Kind | None = None) -> list[float]:
            found = [seen[s, kind] or (seen[s, otherwise] if otherwise else []) for s in range(stages)]
            return [median(times or [0.0]) for times in found]

        return cls(medians("F"), medians("I", "B"), medians("W"), communication)


def _row(name: str, cost: float | Sequence[float], microbatches: int) -> Row:
    if isinstance(cost, int | float):
        return [float(cost)] * microbatches
    if len(cost) != microbatches:
        raise ConfigError(
            f"Costs({name}=...) with {len(cost)} numbers",
            f"the schedule has {microbatches} microbatches, and each takes one",
            f"Give one number for the stage, or {microbatches} of them",
        )
    return [float(value) for value in cost]


def _check_form(name: str, cost: object, depth: int = 0) -> None:
    """A number, or a list of numbers, or one of lists of numbers."""
    if cost is None and name in _OTHERWISE:
        return
    if isinstance(cost, Sequence) and not isinstance(cost, str | bytes) and depth < 2:
        for part in cost:
            _check_form(name, part, depth + 1)
    else:
        _check(name, cost)


def _is_something(cost: object) -> bool:
    return any(map(_is_something, cost)) if isinstance(cost, Sequence) else bool(cost)


def _check(name: str, value: object) -> None:
    if not (_is_number(value) and 0 <= value < inf):  # also where it is not a number
        raise ConfigError(f"Costs({name}={value!r})", "a cost is finite and not negative", "Give 0 or more")


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
