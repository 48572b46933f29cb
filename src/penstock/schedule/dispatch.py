"""List scheduling: whenever a rank is free, a rule says which of its ops it begins.

Ops are whole numbers, three for each stage and microbatch: its F, I and W. There is no whole backward: I and
W next to each other take as long, and the gradient leaves earlier. A line is one kind of op on one stage; its
ops run in the order of the microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heappop, heappush
from itertools import compress
from math import inf
from statistics import fmean
from typing import Any, Self

from penstock.schedule.op_arrays import NOTHING
from penstock.schedule.ops import SOURCE, Kind, Op, Placement, Schedule
from penstock.schedule.simulation.costs import Row

F, I, W = 0, 1, 2  # noqa: E741
SPLIT: tuple[Kind, Kind, Kind] = ("F", "I", "W")
Programs = list[list[int]]


@dataclass(frozen=True)
class OpCosts:
    """What each op takes, by its number.

    copies[i]: the copy of the model that microbatch i goes through
    duration[n]: of op n; delay[n]: how long its input travels
    take[n]: how much more the rank holds from the start of n; give[n]: how much less from its end
    """

    placement: Placement
    microbatches: int
    copies: tuple[int, ...]
    duration: Sequence[float]
    delay: Sequence[float]
    take: Sequence[int]
    give: Sequence[int]

    @property
    def ranks(self) -> int:
        return self.placement.ranks

    @property
    def row(self) -> int:
        """The number of indices per stage."""
        return 3 * self.microbatches

    @cached_property
    def count(self) -> int:
        """The number of indices, with those of no op: their microbatch goes through another copy."""
        return self.row * self.placement.stages

    @cached_property
    def rank_of(self) -> list[int]:
        return [rank for rank in self.placement.rank_of for _ in range(self.row)]

    @cached_property
    def lines(self) -> list[tuple[int, ...]]:
        """By 3 stage + kind: the ops of that kind on that stage, microbatches in order."""
        of_copy = [[copy == this for copy in self.copies] for this in range(self.placement.replicas)]
        return [
            tuple(compress(range(first + kind, first + self.row, 3), of_copy[stage // self.placement.depth]))
            for stage, first in enumerate(range(0, self.count, self.row))
            for kind in (F, I, W)
        ]

    @cached_property
    def line_of(self) -> list[int]:
        return [3 * (op // self.row) + op % 3 for op in range(self.count)]

    @cached_property
    def lines_of(self) -> list[list[int]]:
        """By rank, the lines of its stages."""
        stages = [self.placement.stages_of(rank) for rank in range(self.ranks)]
        return [[3 * stage + kind for stage in hosted for kind in (F, I, W)] for hosted in stages]

    @cached_property
    def ops_of(self) -> list[list[int]]:
        """By rank, its ops, line by line."""
        return [[op for line in lines for op in self.lines[line]] for lines in self.lines_of]

    @cached_property
    def size(self) -> int:
        """The number of ops."""
        return sum(map(len, self.ops_of))

    @cached_property
    def need(self) -> list[int]:
        """The op of the neighbouring stage that feeds op n, or NOTHING."""
        needed: list[int] = []
        for stage in range(self.placement.stages):
            sources = [source_of(self.placement, stage, kind) for kind in SPLIT]
            needed += (
                NOTHING if source is None else source * self.row + n
                for n, source in enumerate(sources * self.microbatches)
            )
        return needed

    @cached_property
    def inputs(self) -> list[int]:
        """The number of ops that op n waits for: the one that feeds it, and the F or I before it."""
        return [(needed != NOTHING) + (op % 3 > F) for op, needed in enumerate(self.need)]

    @cached_property
    def feeds(self) -> list[int]:
        """The op that op n feeds, or NOTHING: `need` the other way round."""
        fed_ops = [NOTHING] * self.count
        for op, needed in enumerate(self.need):
            if needed != NOTHING:
                fed_ops[needed] = op
        return fed_ops

    @cached_property
    def mean_duration(self) -> list[float]:
        """By line, of one op."""
        return [fmean([self.duration[op] for op in line]) for line in self.lines]

    @cached_property
    def mean_delay(self) -> list[float]:
        """By line, of the input of one op."""
        return [fmean([self.delay[op] for op in line]) for line in self.lines]

    def first(self, microbatches: int) -> Self:
        """The same with the first `microbatches` at most."""
        count = min(microbatches, self.microbatches)

        def kept(values: Sequence[Any]) -> list[Any]:
            starts = range(0, self.count, self.row)
            return [value for start in starts for value in values[start : start + 3 * count]]

        return replace(
            self,
            microbatches=count,
            copies=self.copies[:count],
            duration=kept(self.duration),
            delay=kept(self.delay),
            take=kept(self.take),
            give=kept(self.give),
        )

    def in_order(self, lines: Iterable[int]) -> list[int]:
        """The ops of these lines, each line in order."""
        ops = [*map(iter, self.lines)]
        return [next(ops[line]) for line in lines]

    def schedule(self, name: str, programs: Programs) -> Schedule:
        """The schedule of `programs`, with every backward split."""

        ops = [Op(stage, kind, i) for stage in range(self.placement.stages)
               for i in range(self.microbatches) for kind in SPLIT]  # fmt: skip
        by_rank = tuple(tuple(map(ops.__getitem__, program)) for program in programs)
        return Schedule(name, self.placement, self.microbatches, by_rank)


def by_op(rows: Iterable[Iterable[Row]]) -> list[float]:
    """Row by row, what is given by stage, kind and microbatch: by the number of the op."""
    return [value for of_stage in rows for values in zip(*of_stage, strict=True) for value in values]


def source_of(placement: Placement, stage: int, kind: Kind) -> int | None:
    """The stage that sends an op of this kind its input; None: it needs nothing of another stage."""
    source = stage + SOURCE[kind]
    return source if source != stage and source // placement.depth == stage // placement.depth else None


def input_delays(placement: Placement, edges: Sequence[Row]) -> list[list[Row]]:
    """How long the inputs of F, I and W travel, by stage, kind and microbatch; 0 within a rank.

    edges: of the edge behind each stage, by microbatch
    """

    def delays(stage: int, kind: Kind) -> Row:
        source = source_of(placement, stage, kind)
        if source is None or placement.rank_of[source] == placement.rank_of[stage]:
            return [0] * len(edges[stage])
        return edges[min(source, stage)]

    return [[delays(stage, kind) for kind in SPLIT] for stage in range(placement.stages)]


@dataclass(slots=True)
class DispatchState:
    """What has been begun.

    done: ops, by line
    missing, ready_at: by op, how many ops it still waits for, and when the results of the others are there
    held, free_at: by rank, what it holds and when it is free
    """

    costs: OpCosts
    done: list[int]
    missing: list[int]
    ready_at: list[float]
    held: list[int]
    free_at: list[float]
    programs: Programs

    @classmethod
    def of(cls, costs: OpCosts) -> DispatchState:
        ranks = range(costs.ranks)
        return cls(
            costs=costs,
            done=[0] * len(costs.lines),
            missing=costs.inputs.copy(),
            ready_at=[0] * costs.count,
            held=[0 for _ in ranks],
            free_at=[0 for _ in ranks],
            programs=[[] for _ in ranks],
        )

    @property
    def is_complete(self) -> bool:
        return sum(map(len, self.programs)) == self.costs.size


# Gives each run a function of its own. That takes a free rank and the time, and returns the op that the rank
# begins; or NOTHING, and when the rank asks again if no input arrives before.
DispatchRule = Callable[[DispatchState], Callable[[int, float], tuple[int, float]]]


def dispatch(costs: OpCosts, rule: DispatchRule, ahead: float = 0) -> DispatchState:
    """Let every rank follow a rule until all ops have begun, or no rank finds another.

    It is one loop because the search spends its time here.

    ahead: a rank is asked that long before an input arrives
    """
    state = DispatchState.of(costs)
    next_op, done, programs = rule(state), state.done, state.programs
    missing, ready_at, held, free_at = state.missing, state.ready_at, state.held, state.free_at
    duration, delay, take, give = costs.duration, costs.delay, costs.take, costs.give
    rank_of, line_of, feeds = costs.rank_of, costs.line_of, costs.feeds
    asked: list[tuple[float, int]] = [(0, rank) for rank in range(costs.ranks)]
    while asked:
        now, rank = heappop(asked)
        if now < free_at[rank]:
            continue  # it has begun another op meanwhile
        op, again = next_op(rank, now)
        if op == NOTHING:
            if again != inf:
                heappush(asked, (again, rank))
            continue
        ready = ready_at[op]
        free_at[rank] = end = (ready if ready > now else now) + duration[op]
        programs[rank].append(op)
        done[line_of[op]] += 1
        held[rank] += take[op] - give[op]
        heappush(asked, (end, rank))
        if op % 3 != W:
            missing[op + 1] -= 1
            if end > ready_at[op + 1]:
                ready_at[op + 1] = end
        fed = feeds[op]
        if fed == NOTHING:
            continue
        missing[fed] -= 1
        there, other = end + delay[fed], rank_of[fed]
        if there > ready_at[fed]:
            ready_at[fed] = there
        if other == rank or missing[fed]:
            continue
        soon, free = ready_at[fed] - ahead, free_at[other]
        if soon > free or free <= now:  # a rank that is busy until then is asked anyway
            heappush(asked, (soon if soon > now else now, other))
    return state
