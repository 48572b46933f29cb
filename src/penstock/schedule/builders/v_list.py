"""List scheduling on the V placement: each rank takes what comes next as soon as it can, within its memory.

A microbatch goes along the V four times, so that it meets each rank four times. Each way is a leg:

    leg 0  F on stage r           rank 0 -> P-1      slot 4  W of leg 2
    leg 1  F on stage 2P-1-r      rank P-1 -> 0      slot 5  W of leg 3
    leg 2  I on stage 2P-1-r      rank 0 -> P-1
    leg 3  I on stage r           rank P-1 -> 0

A rank that has nothing to do on any leg fills its idle time with a W; and where its memory is full, a W
makes room. So an order of the legs and a limit of live activations give a whole program, for any costs.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from heapq import heappop, heappush
from itertools import islice, product
from math import inf
from statistics import fmean
from typing import NamedTuple, Protocol

from penstock.schedule.costs import Costs, Row
from penstock.schedule.ops import Kind, Op, Schedule, wave

Slots = list[tuple[int, int]]  # a program: (slot, microbatch)
WAIT = -1
_KINDS: tuple[Kind, ...] = ("F", "F", "I", "I", "W", "W")


@dataclass(frozen=True)
class Work:
    """What each op takes on a V.

    takes[r][slot][microbatch]: durations
    delays[r][leg][microbatch]: until the next rank has the result
    """

    ranks: int
    microbatches: int
    takes: Sequence[Sequence[Row]]
    delays: Sequence[Sequence[Row]]

    @classmethod
    def of(cls, ranks: int, microbatches: int, costs: Costs) -> Work:
        placement = wave(ranks)
        by_kind = {kind: costs.durations(kind, placement, microbatches) for kind in _KINDS}
        takes = [
            [by_kind[kind][stage] for stage, kind in zip(_stages(ranks, rank), _KINDS, strict=True)]
            for rank in range(ranks)
        ]
        edges, none = costs.delays(placement, microbatches), [0.0] * microbatches
        edges[ranks - 1] = edges[-1] = none  # the V turns on the last rank, and ends on the first
        delays = [
            [edges[rank], edges[-1 - rank], edges[-2 - rank], edges[rank - 1] if rank else none]
            for rank in range(ranks)
        ]
        return cls(ranks, microbatches, takes, delays)

    def first(self, microbatches: int) -> Work:
        """The same for the first `microbatches` only."""
        takes, delays = (
            [[row[:microbatches] for row in rows] for rows in by_rank]
            for by_rank in (self.takes, self.delays)
        )
        return Work(self.ranks, min(microbatches, self.microbatches), takes, delays)

    @cached_property
    def interval(self) -> float:
        """What the busiest rank computes for one microbatch: no steady state is faster."""
        return max(sum(map(fmean, rows)) for rows in self.takes)


@dataclass
class Rank:
    """Where one rank stands.

    reached: by leg, the microbatch that comes next; arrivals: by leg, when each input is there, in order
    """

    number: int
    limit: int
    reached: list[int] = field(default_factory=lambda: [0] * 4)
    arrivals: list[list[float]] = field(default_factory=lambda: [[] for _ in range(4)])
    outward: int = 0  # live activations of stage r
    live: int = 0  # of both stages
    deferred: deque[tuple[int, int]] = field(default_factory=deque)
    done: Slots = field(default_factory=list)
    free_at: float = 0.0

    def has_room(self, leg: int) -> bool:
        return leg > 1 or self.live < self.limit

    def leaves_room(self, leg: int) -> bool:
        """The last place is not given to leg 0: or a microbatch could not come home through a full rank."""
        return leg > 1 or (self.live < self.limit and (leg == 1 or self.outward < self.limit - 1))


class Rule(Protocol):
    """Which leg a rank turns to."""

    def next(self, rank: Rank, time: float) -> tuple[int, float]:
        """A slot to begin now; or WAIT and when an input is expected that the rank has room for."""


class InOrder:
    """As given, by rank; W may stand in the orders or be left out of all of them."""

    def __init__(self, orders: Sequence[Sequence[int]]) -> None:
        self._orders = orders
        self._at = [0] * len(orders)

    def next(self, rank: Rank, time: float) -> tuple[int, float]:
        order, at = self._orders[rank.number], self._at[rank.number]
        if at == len(order):
            return WAIT, inf
        slot = order[at]
        if slot < 4:
            there = rank.arrivals[slot]
            expected = there[rank.reached[slot]] if rank.reached[slot] < len(there) else inf
            if expected > time or not rank.has_room(slot):
                return WAIT, expected if expected > time else inf
        self._at[rank.number] += 1
        return slot, time


@dataclass(frozen=True)
class Block:
    """A repeating block: microbatch i is on leg l of rank r at ``starts[r][l] + i * interval``."""

    starts: Sequence[Sequence[float]]
    interval: float

    @classmethod
    def of(cls, work: Work, spread: float, gap: float) -> Block:
        """The way of one microbatch; away from rank 0, `spread` times slower than it could be.

        gap: how long it rests between its last forward and its first gradient, in intervals. Blocks that
        follow each other may overlap on a rank; the list scheduler then takes turns.
        """
        starts, time = [[0.0] * 4 for _ in range(work.ranks)], 0.0
        for leg in range(4):
            time += gap * work.interval if leg == 2 else 0.0
            for rank in range(work.ranks) if leg % 2 == 0 else reversed(range(work.ranks)):
                starts[rank][leg] = time
                takes = fmean(work.takes[rank][leg])
                time += takes * (1.0 if leg % 2 else spread) + fmean(work.delays[rank][leg])
        return cls(starts, work.interval)


class ByBlock:
    """What comes first in the block among what is there, but never more than `lead` before what is not."""

    def __init__(self, block: Block, microbatches: int, lead: float) -> None:
        self._starts, self._interval, self._lead = block.starts, block.interval, lead
        self._microbatches = microbatches

    def next(self, rank: Rank, time: float) -> tuple[int, float]:
        interval, starts = self._interval, self._starts[rank.number]
        due = [start + i * interval if i < self._microbatches else inf
               for start, i in zip(starts, rank.reached, strict=True)]  # fmt: skip
        chosen, expected, best = WAIT, inf, min(due) + self._lead + 1e-9 * interval
        for leg, first in enumerate(due):
            there, i = rank.arrivals[leg], rank.reached[leg]
            if first > best or i >= len(there) or not rank.leaves_room(leg):
                continue
            if there[i] > time:
                expected = min(expected, there[i])
            elif chosen == WAIT or first < best:
                chosen, best = leg, first
        return chosen, expected


@dataclass(frozen=True)
class Run:
    """What came of it; a makespan of inf where the ranks got stuck."""

    makespan: float
    programs: list[Slots]


def run(work: Work, limits: Sequence[int], rule: Rule, patience: float | None = 0.0) -> Run:
    """Let every rank follow `rule`; no rank r ever holds more than limits[r] live activations.

    patience: a W that takes w gives way to an input that is expected within ``patience * w``; None: the rule
        itself says where each W stands
    """
    ranks = [Rank(number, limit) for number, limit in enumerate(limits)]
    ranks[0].arrivals[0] = [0.0] * work.microbatches
    events = [(0.0, number) for number in range(work.ranks)]
    left = 6 * work.ranks * work.microbatches
    while events:
        time, number = heappop(events)
        rank = ranks[number]
        if time < rank.free_at:
            continue
        slot, expected = rule.next(rank, time)
        if slot == WAIT:
            if patience is None or not rank.deferred:
                continue
            slot, microbatch = rank.deferred[0]
            if expected - time < patience * work.takes[number][slot][microbatch]:
                continue
        _begin(work, ranks, rank, slot, time, events)
        left -= 1
    makespan = inf if left else max(rank.free_at for rank in ranks)
    return Run(makespan, [rank.done for rank in ranks])


def _begin(
    work: Work, ranks: list[Rank], rank: Rank, slot: int, time: float, events: list[tuple[float, int]]
) -> None:
    """Begin `slot` on `rank` at `time`, and let it and whoever waits for the result look again."""
    if slot > 3:
        _, microbatch = rank.deferred.popleft()
        rank.live -= 1
        rank.outward -= slot == 5
    else:
        microbatch = rank.reached[slot]
        rank.reached[slot] += 1
        if slot < 2:
            rank.live += 1
            rank.outward += slot == 0
        else:
            rank.deferred.append((slot + 2, microbatch))
    rank.done.append((slot, microbatch))
    rank.free_at = end = time + work.takes[rank.number][slot][microbatch]
    heappush(events, (end, rank.number))
    if slot > 3:
        return
    number = rank.number + (-1 if slot % 2 else 1)
    if not 0 <= number < work.ranks:  # the V turns here, or a new leg begins
        if slot < 3:
            rank.arrivals[slot + 1].append(end)
        return
    arrival = end + work.delays[rank.number][slot][microbatch]
    ranks[number].arrivals[slot].append(arrival)
    heappush(events, (max(arrival, ranks[number].free_at), number))


def schedule(name: str, work: Work, programs: Iterable[Slots]) -> Schedule:
    """The programs as ops."""

    def program(rank: int, slots: Slots) -> tuple[Op, ...]:
        table = list(zip(_stages(work.ranks, rank), _KINDS, strict=True))
        return tuple(Op(*table[slot], microbatch) for slot, microbatch in slots)

    placement = wave(work.ranks)
    return Schedule(name, placement, work.microbatches, tuple(program(r, s) for r, s in enumerate(programs)))


def _stages(ranks: int, rank: int) -> tuple[int, ...]:
    """By slot."""
    out, home = rank, 2 * ranks - 1 - rank
    return (out, home, home, out, home, out)


# ---- A V schedule formed for given costs: the best of many repeating blocks, never worse than the usual one.


_BUDGET = 250_000  # ops that the search may simulate: half a second


class Shape(NamedTuple):
    """spread, gap: see Block; lead: see ByBlock, in intervals; patience: see run."""

    spread: float
    gap: float
    lead: float
    patience: float = 0.0

    def run(self, work: Work, limits: Sequence[int]) -> Run:
        block = Block.of(work, self.spread, self.gap)
        rule = ByBlock(block, work.microbatches, self.lead * work.interval)
        found = run(work, limits, rule, self.patience)
        if found.makespan < inf or self.lead == inf:
            return found
        return self._replace(lead=inf).run(work, limits)  # no rank gets stuck that may look ahead without end


_SPREADS = (1.0, 2.0)
_GAPS = (0.0, 1 / 6, 1 / 3, 1 / 2, 2 / 3)
_LEADS = (0.0, 1 / 6, 1 / 3, 1 / 2, 1.0, 2.0, 4.0, inf)
_PATIENCES = (0.0, 0.5, 1.0)
_SHAPES = tuple(Shape(*knobs) for knobs in product(_SPREADS, _GAPS, _LEADS, _PATIENCES))


def form(
    name: str,
    ranks: int,
    microbatches: int,
    limits: Sequence[int],
    usual: Callable[[Work], Run],
    costs: Costs | None,
) -> Schedule:
    """What `usual` makes for unit times; where `costs` are given, a better schedule for them if there is one.

    limits[r]: the most live activations of rank r, whatever the costs
    """
    unit = Work.of(ranks, microbatches, Costs())
    chosen = usual(unit)
    if costs is not None:
        work = Work.of(ranks, microbatches, costs)
        order = InOrder([[slot for slot, _ in slots] for slots in chosen.programs])
        as_usual = run(work, limits, order, patience=None)
        own = _search(work, [usual, *_candidates(limits, chosen)])(work)
        chosen = min(as_usual, own, key=lambda found: found.makespan)
    return schedule(name, unit, chosen.programs)


def _search(work: Work, candidates: Iterable[Callable[[Work], Run]]) -> Callable[[Work], Run]:
    """What does best on the first microbatches: enough for all phases, few enough to try many."""
    sample = work.first(2 * work.ranks + 4)
    affordable = max(1, _BUDGET // (6 * sample.ranks * sample.microbatches))
    return min(islice(candidates, affordable), key=lambda candidate: candidate(sample).makespan)


def _candidates(limits: Sequence[int], usual: Run) -> Iterator[Callable[[Work], Run]]:
    """The usual order of the legs, W where these costs leave time for it; then blocks in a fixed disorder."""

    def in_order(work: Work, patience: float) -> Run:
        legs = [[slot for slot, i in slots if slot < 4 and i < work.microbatches] for slots in usual.programs]
        return run(work, limits, InOrder(legs), patience)

    for patience in (0.0, 0.5, 1.0):
        yield partial(in_order, patience=patience)
    for shape in random.Random(0).sample(_SHAPES, len(_SHAPES)):
        yield partial(shape.run, limits=limits)
