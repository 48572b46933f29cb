"""Durations and sizes of ops and messages, for simulation and search."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median
from typing import TypeGuard, cast

from penstock.errors import ConfigError
from penstock.schedule.ops import Kind, Op, Pair, Placement
from penstock.schedule.simulation.timeline import Timeline

# for all stages; or per stage, and there for all microbatches or one per microbatch
Cost = float | Sequence[float | Sequence[float]]
Row = list[float]  # one number per microbatch

# the costs that may differ between stages; and those that equal another one if they are None
COSTS = ("forward", "input_grad", "weight_grad", "bytes", "activation", "held_for_weight", "buffer", "sent",
         "held_in_forward", "held_in_backward", "exchange", "exchange_in_backward", "offloaded",
         "recomputed", "gather", "reduction")  # fmt: skip
_OTHERWISE = {"held_for_weight": "activation", "sent": "buffer", "held_in_forward": "activation",
              "held_in_backward": "activation", "exchange_in_backward": "exchange",
              "recomputed": "forward"}  # fmt: skip
_OF_A_STEP = ("gather", "reduction")  # once for a stage, whatever the microbatches


@dataclass(frozen=True)
class Costs:
    """Durations in one unit of time and sizes in one unit of memory.

    Each is a number, or a sequence with one number, or one row of microbatches, per stage.

    forward, input_grad, weight_grad: durations of F, I and W; a whole backward B takes I + W
    communication: latency of an edge between two ranks; it occupies neither of them
    bytes: the size of the message behind each stage, and of its gradient; with `bandwidth`, in bytes per unit
        of time, an edge takes ``communication + bytes / bandwidth``
    activation: held from the start of F to the end of I or B
    held_for_weight: held from then to the end of W: part of the activation, and gradients. None: `activation`
    buffer: held for one message over the edge behind each stage, and for its gradient, in the unit of
        `activation`. The receiver holds it from its post (`penstock.schedule.order`) until an op takes it: F
        keeps it in its activation, I and B free it at their end. The sender holds it from the end of its op
        until it has arrived; a runtime that notices later holds it longer
    sent: held by the sender of a forward result instead: less than `buffer`, down to 0, if the graph keeps
        the result anyway. None: `buffer`
    held_in_forward: held while F runs: the activation, and what its ops need meanwhile, such as the whole
        logits of a loss. None: `activation`
    held_in_backward: held while I or B runs: more than the activation if the forward runs again. None:
        `activation`
    exchange: the part of F that waits for other ranks within the op, such as for expert parallelism. Above 0,
        overlapped pairs run side by side and each hides the waits of the other, in the best case
    exchange_in_backward: the same of B or I. None: `exchange`
    offloaded: the part of the activation that waits in host memory (penstock.schedule.offload), in the
        microbatches that gain by it
    host_bandwidth: sizes per unit of time that a rank's link to host memory moves, in each of the two
        directions at once. None: copies take no time
    offload_ahead: number of ops during which a copy may run
    recomputed: how much longer I or B takes where the forward runs again
        (penstock.schedule.simulation.recompute): less than F if a part of its results was kept. None:
        `forward`
    gather: how much longer a stage's first F of a step takes, for the weights that other ranks of the mesh
        hold (FSDP). A number, or one per stage
    reduction: how long a rank sums a stage's gradients over the mesh, after the last op that adds to them. A
        number, or one per stage
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
    held_in_forward: Cost | None = None
    held_in_backward: Cost | None = None
    exchange: Cost = 0.0
    exchange_in_backward: Cost | None = None
    offloaded: Cost = 0.0
    host_bandwidth: float | None = None
    offload_ahead: int = 1
    recomputed: Cost | None = None
    gather: Cost = 0.0
    reduction: Cost = 0.0

    def __post_init__(self) -> None:
        _check("communication", self.communication)
        for name in ("bandwidth", "host_bandwidth"):
            value = getattr(self, name)
            if value is not None and not (is_number(value) and value > 0):
                rule = "it divides bytes, and is a number above 0"
                raise ConfigError(f"Costs({name}={value!r})", rule, "Give bytes a unit of time")
        if type(self.offload_ahead) is not int or self.offload_ahead < 1:
            rule = "it is the number of ops during which a copy may run, from 1 on"
            raise ConfigError(f"Costs(offload_ahead={self.offload_ahead!r})", rule, "Give 1 or more")
        if self.offloads and self.overlaps:
            rule = "the copies of pairs that run side by side are not simulated"
            raise ConfigError("Costs(offloaded=..., exchange=...)", rule, "Leave one of them out")
        for name in COSTS:
            _check_form(name, getattr(self, name), depth=1 if name in _OF_A_STEP else 0)

    @property
    def counts_buffers(self) -> bool:
        """Whether messages hold memory."""
        return any(map(_is_something, (self.buffer, self.sent)))

    @property
    def overlaps(self) -> bool:
        """Whether ops have waits that a pair could hide."""
        return any(map(_is_something, (self.exchange, self.exchange_in_backward)))

    @property
    def offloads(self) -> bool:
        """Whether activations wait in host memory."""
        return _is_something(self.offloaded)

    def rows(self, name: str, placement: Placement, microbatches: int) -> list[Row]:
        """The cost called `name` by stage and microbatch; copies of a stage cost the same.

        Raises ConfigError for sequences of another length.
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
        """The duration of ops of `kind`, by stage and microbatch."""
        if kind != "B":
            name = {"F": "forward", "I": "input_grad", "W": "weight_grad"}[kind]
            return self.rows(name, placement, microbatches)
        halves = (self.durations("I", placement, microbatches), self.durations("W", placement, microbatches))
        return [[i + w for i, w in zip(*rows, strict=True)] for rows in zip(*halves, strict=True)]

    def of_stages(self, name: str, placement: Placement) -> list[float]:
        """The cost called `name`, `gather` or `reduction`, by stage."""
        return [row[0] for row in self.rows(name, placement, 1)]

    def side_by_side(self, placement: Placement, microbatches: int) -> Callable[[Pair], float]:
        """The duration of a pair whose ops start together: the compute of both, or the longer op alone.

        Raises ConfigError for an op that takes less than its exchange.
        """
        forward = self.rows("exchange", placement, microbatches)
        backward = self.rows("exchange_in_backward", placement, microbatches)
        waits: dict[Kind, list[Row]] = {"F": forward, "B": backward, "I": backward}
        durations = {kind: self.durations(kind, placement, microbatches) for kind in waits}

        def checked(op: Op) -> tuple[float, float]:
            """The duration of `op`, and how much of it is its exchange."""
            stage, kind, microbatch = op
            duration, wait = durations[kind][stage][microbatch], waits[kind][stage][microbatch]
            if wait > duration:
                rule = f"the exchange of {op}, {wait:g}, is a part of its duration, {duration:g}"
                raise ConfigError(f"Costs(exchange={self.exchange!r})", rule, "Give at most the duration")
            return duration, wait

        def length(pair: Pair) -> float:
            (forward, forward_wait), (backward, backward_wait) = map(checked, pair)
            return max(forward, backward, forward - forward_wait + backward - backward_wait)

        return length

    def delays(self, placement: Placement, microbatches: int) -> list[Row]:
        """The delay of the edge behind each stage, by microbatch, if it connects two ranks."""
        if self.bandwidth is None:
            return [[self.communication] * microbatches for _ in range(placement.stages)]
        sizes = self.rows("bytes", placement, microbatches)
        return [[self.communication + size / self.bandwidth for size in row] for row in sizes]

    @classmethod
    def measured(cls, timeline: Timeline, communication: float = 0.0) -> Costs:
        """The median durations of each stage's ops in `timeline`, on the device where these are known.

        If no backward of a stage is split, its whole backwards count as `input_grad`. An op that ran next to
        another took longer, so it counts only if no op of its stage and kind ran alone. A timeline does not
        show the `exchange` of an op: set it with `dataclasses.replace`, or pairs run one after the other.
        """
        overlapped = timeline.side_by_side
        seen: dict[tuple[int, Kind], list[float]] = defaultdict(list)
        alone: dict[tuple[int, Kind], list[float]] = defaultdict(list)
        for span in timeline.spans:
            seen[span.op.stage, span.op.kind].append(span.end - span.start)
            if span.op not in overlapped:
                alone[span.op.stage, span.op.kind].append(span.end - span.start)
        if not seen:
            raise ConfigError("a timeline without ops", "costs are measured from ops", "Give one of a step")
        stages = 1 + max(stage for stage, _ in seen)
        seen.update(alone)
        device = {(stage, kind): seconds for stage, kind, seconds in timeline.device}
        took = {of: min(median(times), device.get(of, inf)) for of, times in seen.items()}

        def medians(kind: Kind, otherwise: Kind | None = None) -> list[float]:
            kinds = [kind] if otherwise is None else [kind, otherwise]
            return [next((took[s, k] for k in kinds if (s, k) in took), 0.0) for s in range(stages)]

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
    """Check for a number, a sequence of numbers, or a sequence of those."""
    if cost is None and name in _OTHERWISE:
        return
    if isinstance(cost, Sequence) and not isinstance(cost, str | bytes) and depth < 2:
        for entry in () if _are_right(cost) else cost:
            _check_form(name, entry, depth + 1)
    else:
        _check(name, cost)


def _are_right(row: Sequence[object]) -> bool:
    """Whether all are plain numbers that `_check` takes: a search checks millions."""
    if not row or not {*map(type, row)} <= {int, float}:
        return False
    numbers = cast(Sequence[float], row)
    return min(numbers) >= 0 and sum(numbers) < inf  # which no NaN is


def _is_something(cost: object) -> bool:
    return any(map(_is_something, cost)) if isinstance(cost, Sequence) else bool(cost)


def _check(name: str, value: object) -> None:
    if not (is_number(value) and 0 <= value < inf):  # also where it is not a number
        raise ConfigError(f"Costs({name}={value!r})", "a cost is finite and not negative", "Give 0 or more")


def is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
