"""List scheduling on the V placement: each rank runs its next op as soon as it can, within its memory.

A microbatch crosses the V four times and so meets each rank four times. Each crossing is a leg:

    leg 0  F on stage r           rank 0 -> P-1      slot 4  W of leg 2
    leg 1  F on stage 2P-1-r      rank P-1 -> 0      slot 5  W of leg 3
    leg 2  I on stage 2P-1-r      rank 0 -> P-1
    leg 3  I on stage r           rank P-1 -> 0

A rank whose rule waits fills the idle time with a W; where its memory is full, a W frees some. So a rule for
the legs and a limit of live activations make a whole program, for any costs. `form` tries many rules, and
then how long each rank waits for an input before it begins a W.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from heapq import heappop, heappush
from itertools import count, islice, product
from math import inf
from operator import itemgetter
from statistics import fmean
from typing import NamedTuple

from penstock.schedule.builders.one_f_one_b import row
from penstock.schedule.ops import Kind, Op, Schedule, wave
from penstock.schedule.simulation.costs import Costs, Row
from penstock.schedule.simulation.timeline import Objective, check_objective

Slots = list[tuple[int, int]]  # a program: (slot, microbatch)
WAIT = -1
_KINDS: tuple[Kind, ...] = ("F", "F", "I", "I", "W", "W")


@dataclass(frozen=True)
class VDurations:
    """The durations of ops and messages on a V.

    takes[r][slot][microbatch]: durations
    delays[r][leg][microbatch]: until the next rank has the result
    """

    ranks: int
    microbatches: int
    takes: Sequence[Sequence[Row]]
    delays: Sequence[Sequence[Row]]

    @classmethod
    def of(cls, ranks: int, microbatches: int, costs: Costs) -> VDurations:
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

    def first(self, microbatches: int) -> VDurations:
        """The durations of the first `microbatches` only."""
        takes, delays = (
            [[row[:microbatches] for row in rows] for rows in by_rank]
            for by_rank in (self.takes, self.delays)
        )
        return VDurations(self.ranks, min(microbatches, self.microbatches), takes, delays)

    @cached_property
    def interval(self) -> float:
        """The compute of the busiest rank per microbatch: no steady state is faster."""
        return max(sum(map(fmean, rows)) for rows in self.takes)


@dataclass(slots=True)
class RankState:
    """The state of one rank.

    reached: by leg, the next microbatch; arrivals: by leg, when each input arrives, in order
    deferred: the slot and microbatch of each W that can run
    """

    index: int
    limit: int
    reached: list[int] = field(default_factory=lambda: [0] * 4)
    arrivals: list[list[float]] = field(default_factory=lambda: [[] for _ in range(4)])
    outward: int = 0  # live activations of stage r
    live: int = 0  # of both stages
    deferred: deque[tuple[int, int]] = field(default_factory=deque)
    done: Slots = field(default_factory=list)
    free_at: float = 0.0

    def begin(self, slot: int) -> int:
        """Note that the next op of `slot` runs. Returns its microbatch."""
        if slot > 3:
            _, microbatch = self.deferred.popleft()
            self.live -= 1
            self.outward -= slot == 5
        else:
            microbatch = self.reached[slot]
            self.reached[slot] += 1
            if slot > 1:
                self.deferred.append((slot + 2, microbatch))
            else:
                self.live += 1
                self.outward += slot == 0
        self.done.append((slot, microbatch))
        return microbatch

    def leaves_room(self, leg: int) -> bool:
        """Leg 0 may not take the last place, or no microbatch could come back through a full rank."""
        return leg > 1 or (self.live < self.limit and (leg == 1 or self.outward < self.limit - 1))


# Returns the slot that a rank begins now; or WAIT, and when the next input that it has room for arrives.
DispatchRule = Callable[[RankState, float], tuple[int, float]]


def in_order(orders: Sequence[Sequence[int]]) -> DispatchRule:
    """Each rank takes its slots in the order listed for it; W may be listed, or left out for all ranks."""
    reached = [0] * len(orders)

    def next_slot(rank: RankState, time: float) -> tuple[int, float]:
        order, at = orders[rank.index], reached[rank.index]
        if at == len(order):
            return WAIT, inf
        slot = order[at]
        if slot < 4:
            arrivals, i = rank.arrivals[slot], rank.reached[slot]
            expected = arrivals[i] if i < len(arrivals) else inf
            if expected > time:
                return WAIT, expected
            if slot < 2 and rank.live >= rank.limit:
                return WAIT, inf
        reached[rank.index] += 1
        return slot, time

    return next_slot


def ending_early(orders: Sequence[Sequence[int]], microbatches: int) -> DispatchRule:
    """`in_order`, except for W in the last phase of rank 0, which fills every wait there.

    From its last leg 2 on, no rank waits for rank 0: it ends as early as the gradients that reach it allow.
    """
    follow = in_order(orders)

    def next_slot(rank: RankState, time: float) -> tuple[int, float]:
        if rank.index or rank.reached[2] < microbatches:
            return follow(rank, time)
        arrivals, i = rank.arrivals[3], rank.reached[3]
        expected = arrivals[i] if i < len(arrivals) else inf
        if expected <= time:
            return 3, time
        return (rank.deferred[0][0], time) if rank.deferred else (WAIT, expected)

    return next_slot


def by_block(work: VDurations, spread: float, gap: float, lead: float) -> DispatchRule:
    """A repeating block: microbatch i reaches leg l of rank r at ``starts[r][l] + i * interval``.

    A block is the path of one microbatch. Blocks may overlap on a rank. Of the ready ops, the rank takes the
    one that is due first, unless an op that is not ready yet is due more than `lead` earlier.

    spread: how many times slower than possible the two legs away from rank 0 are
    gap: the pause between the last forward and the first gradient, in intervals
    """
    interval, starts, start = work.interval, [[0.0] * 4 for _ in range(work.ranks)], 0.0
    for leg in range(4):
        start += gap * interval if leg == 2 else 0.0
        for index in range(work.ranks) if leg % 2 == 0 else reversed(range(work.ranks)):
            starts[index][leg] = start
            takes = fmean(work.takes[index][leg])
            start += takes * (1.0 if leg % 2 else spread) + fmean(work.delays[index][leg])

    def next_slot(rank: RankState, time: float) -> tuple[int, float]:
        due = [first + i * interval if i < work.microbatches else inf
               for first, i in zip(starts[rank.index], rank.reached, strict=True)]  # fmt: skip
        chosen, expected, best = WAIT, inf, min(due) + lead + 1e-9 * interval
        for leg, first in enumerate(due):
            arrivals, i = rank.arrivals[leg], rank.reached[leg]
            if first > best or i >= len(arrivals) or not rank.leaves_room(leg):
                continue
            if arrivals[i] > time:
                expected = min(expected, arrivals[i])
            elif chosen == WAIT or first < best:
                chosen, best = leg, first
        return chosen, expected

    return next_slot


@dataclass(frozen=True)
class TimedPrograms:
    """Programs with their makespan and extent (`Timeline`), which are inf if the ranks got stuck."""

    makespan: float
    extent: float
    programs: list[Slots]

    def length(self, objective: Objective) -> float:
        return self.makespan if objective == "makespan" else self.extent


# per rank, until its last microbatch has entered and after that: a rank does not begin a W of length w if an
# input is expected within ``patience * w``
Patience = Sequence[tuple[float, float]]


def run(
    work: VDurations, limits: Sequence[int], rule: DispatchRule, patience: float | Patience | None = 0.0
) -> TimedPrograms:
    """Let every rank follow `rule`; rank r never holds more than limits[r] live activations.

    patience: one number counts for all ranks, and throughout; None: the rule places every W itself
    """
    by_rank = [(patience, patience)] * work.ranks if isinstance(patience, int | float) else patience
    ranks = [RankState(index, limit) for index, limit in enumerate(limits)]
    ranks[0].arrivals[0] = [0.0] * work.microbatches
    events = [(0.0, index) for index in range(work.ranks)]
    left = 6 * work.ranks * work.microbatches
    while events:
        time, index = heappop(events)
        rank = ranks[index]
        if time < rank.free_at:
            continue
        slot, expected = rule(rank, time)
        if slot == WAIT:
            if by_rank is None or not rank.deferred:
                continue
            slot, microbatch = rank.deferred[0]
            shortest = by_rank[index][rank.reached[0] == work.microbatches]
            if expected - time < shortest * work.takes[index][slot][microbatch]:
                continue
        microbatch = rank.begin(slot)
        left -= 1
        rank.free_at = end = time + work.takes[index][slot][microbatch]
        heappush(events, (end, index))
        if slot > 3:
            continue
        taker = index + (-1 if slot % 2 else 1)
        if 0 <= taker < work.ranks:
            arrival = end + work.delays[index][slot][microbatch]
            other = ranks[taker]
            other.arrivals[slot].append(arrival)
            if arrival > other.free_at or other.free_at <= time:  # a busy rank looks once it is free
                heappush(events, (max(arrival, other.free_at), taker))
        elif slot < 3:  # the V turns here, or a new leg begins
            rank.arrivals[slot + 1].append(end)
    programs = [rank.done for rank in ranks]
    if left:
        return TimedPrograms(inf, inf, programs)
    makespan = max(rank.free_at for rank in ranks)
    # a rank begins with the first forward that arrives: all else comes after it
    return TimedPrograms(makespan, max(rank.free_at - rank.arrivals[0][0] for rank in ranks), programs)


def schedule(name: str, work: VDurations, programs: Iterable[Slots]) -> Schedule:
    """The programs as ops. Every slot has its microbatches in order."""

    def program(rank: int, slots: Slots) -> tuple[Op, ...]:
        pairs = zip(_stages(work.ranks, rank), _KINDS, strict=True)
        ops = [iter(row(stage, kind, range(work.microbatches))) for stage, kind in pairs]
        return tuple(map(next, map(ops.__getitem__, map(itemgetter(0), slots))))

    placement = wave(work.ranks)
    return Schedule(name, placement, work.microbatches, tuple(program(r, s) for r, s in enumerate(programs)))


def _stages(ranks: int, rank: int) -> tuple[int, ...]:
    """The stage of each slot."""
    out, home = rank, 2 * ranks - 1 - rank
    return (out, home, home, out, home, out)


# ---- The best of many rules for given costs


_BUDGET = 250_000  # ops that may be simulated, twice: a second
_WALK = 100  # steps of the walk over the patience of each rank


class BlockRule(NamedTuple):
    """A rule `by_block`, with `lead` in intervals, and the patience of its `run`."""

    spread: float
    gap: float
    lead: float
    patience: float = 0.0

    def run(self, work: VDurations, limits: Sequence[int]) -> TimedPrograms:
        rule = by_block(work, self.spread, self.gap, self.lead * work.interval)
        attempt = run(work, limits, rule, self.patience)
        if attempt.makespan < inf or self.lead == inf:
            return attempt
        return self._replace(lead=inf).run(work, limits)  # with no limit ahead, no rank gets stuck


_SHAPES = tuple(
    BlockRule(*values)
    for values in product(
        (1.0, 2.0),
        (0.0, 1 / 6, 1 / 3, 1 / 2, 2 / 3),
        (0.0, 1 / 6, 1 / 3, 1 / 2, 1.0, 2.0, 4.0, inf),
        (0.0, 0.5, 1.0),
    )
)


def form(
    name: str,
    ranks: int,
    microbatches: int,
    limits: Sequence[int],
    usual: Callable[[VDurations], TimedPrograms],
    costs: Costs | None,
    objective: Objective = "makespan",
) -> Schedule:
    """The programs that `usual` makes for unit times; with `costs`, the best found for them.

    That is never longer, at these costs and by the objective, than the programs for unit times.

    limits[r]: the most live activations of rank r, whatever the costs
    objective: which length of a step is to be small
    """
    check_objective(objective)
    unit = VDurations.of(ranks, microbatches, Costs())
    chosen = _repeated(usual, unit)
    if costs is not None:
        work = VDurations.of(ranks, microbatches, costs)
        chosen = _formed(usual, chosen, limits, work, objective)
    return schedule(name, unit, chosen.programs)


def _formed(
    usual: Callable[[VDurations], TimedPrograms],
    at_unit_times: TimedPrograms,
    limits: Sequence[int],
    work: VDurations,
    objective: Objective,
) -> TimedPrograms:
    """The best of many programs for `work`, that `at_unit_times` among them."""

    def shortest(*variants: TimedPrograms) -> TimedPrograms:
        return min(variants, key=lambda variant: variant.length(objective))

    slots = [[slot for slot, _ in program] for program in at_unit_times.programs]
    chosen = run(work, limits, in_order(slots), patience=None)
    if objective == "extent":
        chosen = shortest(chosen, run(work, limits, ending_early(slots, work.microbatches), patience=None))
    sample = work.first(2 * work.ranks + 4)  # enough for all phases, few enough to try many
    affordable = max(1, _BUDGET // (6 * sample.ranks * sample.microbatches))
    tried = islice([usual, *_candidates(limits, at_unit_times)], affordable)
    best = min(tried, key=lambda candidate: candidate(sample).length(objective))
    chosen = shortest(chosen, best(work))
    refined = _refined(chosen, limits, sample, min(affordable, _WALK), objective)
    return shortest(chosen, refined(work))


_SETTLED = 3  # microbatches per rank after which the middle of every program is its steady state


def _repeated(rule: Callable[[VDurations], TimedPrograms], work: VDurations) -> TimedPrograms:
    """``rule(work)`` at unit times, from fewer microbatches and their steady state repeated.

    A run is deterministic: once every rank does the same in each interval, it does so until the microbatches
    run out. If some program shows no such interval in its middle, the rule runs on all microbatches.
    """
    few = work.first(_SETTLED * work.ranks)
    short_run, more = rule(few), work.microbatches - few.microbatches
    slots = [[slot for slot, _ in program] for program in short_run.programs]
    middle = 3 * few.microbatches
    intervals = [program[middle : middle + 6] for program in slots]
    if not more:
        return short_run
    if any(program[middle - 6 : middle] != interval or len({*interval}) < 6
           for program, interval in zip(slots, intervals, strict=True)):  # fmt: skip
        return rule(work)
    extended = [program[:middle] + interval * more + program[middle:]
                for program, interval in zip(slots, intervals, strict=True)]  # fmt: skip
    longer = more * work.interval
    programs = [_numbered(program) for program in extended]
    return TimedPrograms(short_run.makespan + longer, short_run.extent + longer, programs)


def _numbered(slots: Iterable[int]) -> Slots:
    """Each slot with its microbatches in order."""
    slots, reached = [*slots], [count() for _ in _KINDS]
    return [*zip(slots, map(next, map(reached.__getitem__, slots)), strict=True)]


def _legs_in_order(
    usual: TimedPrograms, limits: Sequence[int], patience: float | Patience, work: VDurations
) -> TimedPrograms:
    """The order of the legs in `usual`, with W placed anew."""
    legs = [[slot for slot, i in slots if slot < 4 and i < work.microbatches] for slots in usual.programs]
    return run(work, limits, in_order(legs), patience)


# few pairs that differ much: where W runs early or late decides what is left to fill the drain with
_PAIRS = ((0.5, 0.1), (1.0, 0.1), (0.1, 1.0), (0.25, 0.0), (0.1, 0.1))


def _refined(
    usual: TimedPrograms, limits: Sequence[int], sample: VDurations, tries: int, objective: Objective
) -> Callable[[VDurations], TimedPrograms]:
    """The order of the legs in `usual`, with a patience of each rank's own: the best of a random walk."""
    draw, patience = random.Random(0), [(0.5, 0.5)] * sample.ranks
    best = _legs_in_order(usual, limits, patience, sample).length(objective)
    for _ in range(tries):
        changed = patience.copy()
        changed[draw.randrange(sample.ranks)] = draw.choice(_PAIRS)
        length = _legs_in_order(usual, limits, changed, sample).length(objective)
        if length <= best:
            best, patience = length, changed
    return partial(_legs_in_order, usual, limits, patience)


def _candidates(
    limits: Sequence[int], usual: TimedPrograms
) -> Iterator[Callable[[VDurations], TimedPrograms]]:
    """The usual order of the legs with W placed for the costs; then blocks, in a fixed random order."""

    for patience in (0.0, 0.5, 1.0):
        yield partial(_legs_in_order, usual, limits, patience)
    for shape in random.Random(0).sample(_SHAPES, len(_SHAPES)):
        yield partial(shape.run, limits=limits)
