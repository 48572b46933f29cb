"""The problem that is searched, in whole numbers; and the budget of a search."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import ceil, floor, lcm

from penstock.schedule.dispatch import SPLIT, F, I, OpCosts, Programs, W, by_op, input_delays
from penstock.schedule.ops import Placement, Schedule
from penstock.schedule.simulation.costs import Costs

_MAX_QUANTA = 10**9  # in the sum of all times: CP-SAT multiplies times with sizes, in 64 bits
_DENOMINATOR = 10_000  # of the numbers that people write


@dataclass(frozen=True)
class Problem(OpCosts):
    """Times are whole quanta, sizes whole grains.

    limit[r]: the most that rank r may hold
    offset[r]: when the time of rank r begins to count
    exact_sizes: no size was rounded; otherwise all were rounded up. Times are rounded down if at all
    alike: every microbatch costs the same, so that their order on a stage does not matter
    """

    duration: list[int]
    delay: list[int]
    quantum: float
    limit: list[int]
    offset: list[int]
    exact_sizes: bool
    alike: bool

    def by_line(self, pick: Callable[[list[int]], int], values: Sequence[int]) -> list[int]:
        """By line: the min, max or sum (`pick`) of its ops' `values`; 0 for a line without ops."""
        return [pick([values[op] for op in line] or [0]) for line in self.lines]

    @cached_property
    def work(self) -> list[int]:
        """By rank: the sum of its durations."""
        return [sum(self.duration[op] for op in ops) for ops in self.ops_of]

    @cached_property
    def arrival(self) -> list[int]:
        """By line: no op of it can start earlier, whatever the ranks do."""
        least, delays = self.by_line(min, self.duration), self.by_line(min, self.delay)
        earliest, depth = [0] * len(self.lines), self.placement.depth
        for first in range(0, self.placement.stages, depth):
            now = 0
            for stage in range(first, first + depth):
                earliest[3 * stage + F] = now + delays[3 * stage + F]
                now = earliest[3 * stage + F] + least[3 * stage + F]
            for stage in reversed(range(first, first + depth)):
                earliest[3 * stage + I] = now + delays[3 * stage + I]
                now = earliest[3 * stage + I] + least[3 * stage + I]
                earliest[3 * stage + W] = now
        return earliest

    @cached_property
    def cycle(self) -> float:
        """The mean time of the busiest rank per microbatch."""
        return max(self.work) / self.microbatches

    def programs(self, schedule: Schedule) -> Programs:
        """The programs of a schedule, with each whole backward as I and W."""
        programs: Programs = []
        for program in schedule.programs:
            numbers: list[int] = []
            for stage, kind, microbatch in program:
                first = stage * self.row + 3 * microbatch
                numbers += (first + I, first + W) if kind == "B" else (first + SPLIT.index(kind),)
            programs.append(numbers)
        return programs


def problem(
    placement: Placement,
    microbatches: int,
    costs: Costs,
    limits: Sequence[float | None],
    copies: tuple[int, ...] | None = None,
    from_first_op: bool = False,
) -> Problem:
    """The costs as whole numbers.

    limits: by rank, None for no limit
    copies: as in OpCosts; None: the copies take the microbatches in turn
    from_first_op: the time of each rank counts from when its first op can start at best
    """
    times = [costs.durations(kind, placement, microbatches) for kind in SPLIT]
    edges = costs.delays(placement, microbatches)
    sizes = [costs.rows(name, placement, microbatches) for name in ("activation", "held_for_weight")]
    per_unit, exact = _quanta([x for rows in (*times, edges) for row in rows for x in row])
    finite = [x for x in limits if x is not None]
    per_size, exact_sizes = _quanta([*finite, *(x for rows in sizes for row in rows for x in row)])

    def quanta(time: float) -> int:
        return round(time * per_unit) if exact else floor(time * per_unit)

    def grains(size: float) -> int:
        return round(size * per_size) if exact_sizes else ceil(size * per_size)

    take, give = _sizes_by_op(*([grains(x) for row in rows for x in row] for rows in sizes))
    total = sum(take) + 1
    scaled = Problem(
        placement=placement,
        microbatches=microbatches,
        copies=copies or tuple(i % placement.replicas for i in range(microbatches)),
        duration=[*map(quanta, by_op(zip(*times, strict=True)))],
        delay=[*map(quanta, by_op(input_delays(placement, edges)))],
        take=take,
        give=give,
        quantum=1 / per_unit,
        # a limit that `simulate` calls kept, up to a last digit, is kept here
        limit=[total if x is None else min(total, floor(x * per_size * (1 + 1e-12) + 1e-9)) for x in limits],
        offset=[0] * placement.ranks,
        exact_sizes=exact_sizes,
        alike=all(row == row[:1] * len(row) for rows in (*times, edges, *sizes) for row in rows),
    )
    if from_first_op:
        scaled.offset[:] = [min(scaled.arrival[line] for line in lines) for lines in scaled.lines_of]
    return scaled


def _sizes_by_op(activations: Sequence[int], kept: Sequence[int]) -> tuple[list[int], list[int]]:
    """What each op takes of memory, and what it gives back.

    activations, kept: by F, what is held until its I, and until its W
    """
    take, give = list[int](), list[int]()
    for activation, rest in zip(activations, kept, strict=True):
        # if W keeps more than was held before I, I takes the difference
        take += (activation, max(0, rest - activation), 0)
        give += (0, max(0, activation - rest), rest)
    return take, give


def _quanta(values: Sequence[float]) -> tuple[float, bool]:
    """Quanta per unit, and whether every value is a whole number of them."""
    total, per_unit = sum(values), 1
    for value in set(values):
        near = Fraction(value).limit_denominator(_DENOMINATOR)
        per_unit = lcm(per_unit, near.denominator)
        if abs(float(near) - value) > 1e-12 * max(1.0, value) or total * per_unit > _MAX_QUANTA:
            return _MAX_QUANTA / total, False
    return float(per_unit), True


# ---- `seconds` of search are counted as work, so that a call gives the same result on any machine

_PER_SECOND = 4_000_000  # of the steps below, on one core of 2024
OP_TIMED = 1  # one op run once
OP_LISTED = 9  # one op chosen by list scheduling
OP_MODELLED = 300  # one op in a CP-SAT model
CP_SAT_SECOND = 15_000_000  # one of CP-SAT's deterministic seconds
_PATIENCE = 4.0  # after so many times `seconds` on the clock, the search stops in any case


class Budget:
    """`spent` of `total` steps. cut_short: the clock ended the search before the count did."""

    def __init__(self, seconds: float) -> None:
        self.total = seconds * _PER_SECOND
        self.spent = 0.0
        self.cut_short = False
        self._stop = time.monotonic() + _PATIENCE * seconds + 5.0

    def spend(self, steps: float) -> None:
        self.spent += steps

    def left(self, share: float = 1.0) -> float:
        """Steps until `share` of the total is spent."""
        if self.wall_left <= 0:
            self.cut_short = True
        return 0.0 if self.cut_short else max(0.0, share * self.total - self.spent)

    @property
    def wall_left(self) -> float:
        """Seconds on the clock."""
        return self._stop - time.monotonic()
