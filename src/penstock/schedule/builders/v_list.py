"""List scheduling on the V placement: each rank runs its next op as soon as it can, within its memory.

A microbatch crosses the V four times and so meets each rank four times. Each crossing is a leg:

    leg 0  F on stage r           rank 0 -> P-1      W of leg 3
    leg 1  F on stage 2P-1-r      rank P-1 -> 0      W of leg 2
    leg 2  I on stage 2P-1-r      rank 0 -> P-1
    leg 3  I on stage r           rank P-1 -> 0

A rank whose rule waits fills the idle time with a W; where its memory is full, a W frees some. So a rule for
the legs and a limit of live activations make a whole program, for any costs. `form` tries many rules, and
then how long each rank waits for an input before it begins a W.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, product
from math import inf
from typing import NamedTuple

from penstock.schedule.dispatch import (
    SPLIT,
    DispatchState,
    F,
    I,
    OpCosts,
    W,
    by_op,
    dispatch,
    input_delays,
)
from penstock.schedule.op_arrays import NOTHING
from penstock.schedule.ops import Schedule, wave
from penstock.schedule.simulation.costs import Costs
from penstock.schedule.simulation.timeline import Objective, check_objective

Orders = Sequence[list[int]]  # by rank, lines; the microbatches of each line come in order


def v_costs(ranks: int, microbatches: int, costs: Costs) -> OpCosts:
    """The costs of the ops on a V; every activation has size 1."""
    placement = wave(ranks)
    times = [costs.durations(kind, placement, microbatches) for kind in SPLIT]
    return OpCosts(
        placement=placement,
        microbatches=microbatches,
        copies=(0,) * microbatches,
        duration=by_op(zip(*times, strict=True)),
        delay=by_op(input_delays(placement, costs.delays(placement, microbatches))),
        take=[1, 0, 0] * placement.stages * microbatches,
        give=[0, 0, 1] * placement.stages * microbatches,
    )


def legs_of(ranks: int, rank: int) -> tuple[int, int, int, int]:
    """The line of each leg on a rank."""
    out, home = 3 * rank, 3 * (2 * ranks - 1 - rank)
    return out + F, home + F, home + I, out + I


def of_the_first(microbatches: int, lines: Iterable[int]) -> Iterator[int]:
    """Drop the ops of later microbatches."""
    reached: Counter[int] = Counter()
    for line in lines:
        if reached[line] < microbatches:
            yield line
        reached[line] += 1


def interval_of(costs: OpCosts) -> float:
    """The compute of the busiest rank per microbatch: no steady state is faster."""
    return max(sum(costs.mean_duration[line] for line in lines) for lines in costs.lines_of)


class VState:
    """What has been begun on a V: lists that change as the run goes on, by line, op or rank.

    limits: by rank, the most live activations
    """

    def __init__(self, begun: DispatchState, limits: Sequence[int]) -> None:
        self.costs, self.limits = begun.costs, limits
        self.done, self.held = begun.done, begun.held
        self.missing, self.ready_at = begun.missing, begun.ready_at
        ranks = range(begun.costs.ranks)
        self.legs = [legs_of(begun.costs.ranks, rank) for rank in ranks]
        self._weights = [[line + W - I for line in self.legs[rank][2:]] for rank in ranks]

    def leaves_room(self, rank: int, leg: int) -> bool:
        """Leg 0 may not take the last place, or no microbatch could come back through a full rank."""
        held, limit = self.held[rank], self.limits[rank]
        return leg > 1 or (
            held < limit and (leg == 1 or self.done[3 * rank + F] - self.done[3 * rank + W] < limit - 1)
        )

    def deferred(self, rank: int) -> int:
        """The W that could have begun first, or NOTHING."""
        first, soonest = NOTHING, inf
        for line in self._weights[rank]:
            at = self.done[line]
            if at < self.costs.microbatches:
                op = self.costs.lines[line][at]
                if not self.missing[op] and self.ready_at[op] < soonest:
                    first, soonest = op, self.ready_at[op]
        return first


# Gives each run a function of its own. That takes a free rank and the time, and returns the op that the rank
# begins; or NOTHING, and when the next input that it has room for arrives.
VRule = Callable[[VState], Callable[[int, float], tuple[int, float]]]


def in_order(orders: Orders) -> VRule:
    """Each rank takes its lines in the order listed for it; W may be listed, or left out for all ranks."""

    def begin(state: VState) -> Callable[[int, float], tuple[int, float]]:
        reached = [0] * len(orders)
        lines, done, missing, ready_at = state.costs.lines, state.done, state.missing, state.ready_at

        def next_op(rank: int, now: float) -> tuple[int, float]:
            order, at = orders[rank], reached[rank]
            if at == len(order):
                return NOTHING, inf
            line = order[at]
            op = lines[line][done[line]]
            if missing[op]:
                return NOTHING, inf
            if ready_at[op] > now:
                return NOTHING, ready_at[op]
            if line % 3 == F and state.held[rank] >= state.limits[rank]:
                return NOTHING, inf
            reached[rank] += 1
            return op, now

        return next_op

    return begin


def ending_early(orders: Orders) -> VRule:
    """`in_order`, except for W in the last phase of rank 0, which fills every wait there.

    From its last leg 2 on, no rank waits for rank 0: it ends as early as the gradients that reach it allow.
    """

    def begin(state: VState) -> Callable[[int, float], tuple[int, float]]:
        follow, count, lines = in_order(orders)(state), state.costs.microbatches, state.costs.lines
        _, _, turn, last = state.legs[0]

        def next_op(rank: int, now: float) -> tuple[int, float]:
            if rank or state.done[turn] < count:
                return follow(rank, now)
            at, expected = state.done[last], inf
            if at < count and not state.missing[lines[last][at]]:
                expected = state.ready_at[lines[last][at]]
            if expected <= now:
                return lines[last][at], now
            return state.deferred(rank), expected

        return next_op

    return begin


def by_block(costs: OpCosts, spread: float, gap: float, lead: float) -> VRule:
    """A repeating block: microbatch i reaches leg l of rank r at ``starts[r][l] + i * interval``.

    A block is the path of one microbatch. Blocks may overlap on a rank. Of the ready ops, the rank takes the
    one that is due first, unless an op that is not ready yet is due more than `lead` earlier.

    spread: how many times slower than possible the two legs away from rank 0 are
    gap: the pause between the last forward and the first gradient, in intervals
    """
    interval, legs = interval_of(costs), [legs_of(costs.ranks, rank) for rank in range(costs.ranks)]
    starts, start = [[0.0] * 4 for _ in legs], 0.0
    for leg in range(4):
        start += gap * interval if leg == 2 else 0.0
        for rank in range(costs.ranks) if leg % 2 == 0 else reversed(range(costs.ranks)):
            starts[rank][leg] = start
            line = legs[rank][leg]
            fed = costs.feeds[costs.lines[line][0]]
            delay = costs.mean_delay[costs.line_of[fed]] if fed != NOTHING else 0.0
            start += costs.mean_duration[line] * (1.0 if leg % 2 else spread) + delay

    def begin(state: VState) -> Callable[[int, float], tuple[int, float]]:
        done, missing, ready_at, count = state.done, state.missing, state.ready_at, costs.microbatches
        lines = [[costs.lines[line] for line in of_rank] for of_rank in legs]

        def next_op(rank: int, now: float) -> tuple[int, float]:
            reached = [done[line] for line in legs[rank]]
            due = [first + at * interval if at < count else inf
                   for first, at in zip(starts[rank], reached, strict=True)]  # fmt: skip
            chosen, expected, best = NOTHING, inf, min(due) + lead + 1e-9 * interval
            for leg, first in enumerate(due):
                if first > best or reached[leg] == count:
                    continue
                op = lines[rank][leg][reached[leg]]
                if missing[op] or not state.leaves_room(rank, leg):
                    continue
                if ready_at[op] > now:
                    expected = min(expected, ready_at[op])
                elif chosen == NOTHING or first < best:
                    chosen, best = op, first
            return chosen, expected

        return next_op

    return begin


@dataclass(frozen=True)
class TimedOrders:
    """Orders with their makespan and extent (`Timeline`), which are inf if the ranks got stuck."""

    makespan: float
    extent: float
    orders: Orders

    def length(self, objective: Objective) -> float:
        return self.makespan if objective == "makespan" else self.extent


# per rank, until its last microbatch has entered and after that: a rank does not begin a W of length w if an
# input is expected within ``patience * w``
Patience = Sequence[tuple[float, float]]


def run(
    costs: OpCosts, limits: Sequence[int], rule: VRule, patience: float | Patience | None = 0.0
) -> TimedOrders:
    """Let every rank follow `rule`; rank r never holds more than limits[r] live activations.

    patience: one number counts for all ranks, and throughout; None: the rule places every W itself
    """
    by_rank = [(patience, patience)] * costs.ranks if isinstance(patience, int | float) else patience

    def begin(begun: DispatchState) -> Callable[[int, float], tuple[int, float]]:
        state = VState(begun, limits)
        prefer = rule(state)

        def next_op(rank: int, now: float) -> tuple[int, float]:
            op, expected = prefer(rank, now)
            if op != NOTHING or by_rank is None:
                return op, inf
            op = state.deferred(rank)
            if op == NOTHING:
                return op, inf
            shortest = by_rank[rank][state.done[3 * rank + F] == costs.microbatches]
            return NOTHING if expected - now < shortest * costs.duration[op] else op, inf

        return next_op

    end = dispatch(costs, begin)
    orders = [[costs.line_of[op] for op in program] for program in end.programs]
    if not end.is_complete:
        return TimedOrders(inf, inf, orders)
    # a rank begins with the first forward that arrives: all else comes after it
    starts = [end.ready_at[costs.lines[3 * rank + F][0]] for rank in range(costs.ranks)]
    extent = max(free_at - start for free_at, start in zip(end.free_at, starts, strict=True))
    return TimedOrders(max(end.free_at), extent, orders)


def schedule(name: str, costs: OpCosts, orders: Orders) -> Schedule:
    """The schedule whose ranks have these orders."""
    return costs.schedule(name, [costs.in_order(lines) for lines in orders])


# ---- The best of many rules for given costs


_BUDGET = 250_000  # ops that may be simulated, twice: a second
_WALK = 100  # steps of the walk over the patience of each rank


class BlockRule(NamedTuple):
    """A rule `by_block`, with `lead` in intervals, and the patience of its `run`."""

    spread: float
    gap: float
    lead: float
    patience: float = 0.0

    def run(self, costs: OpCosts, limits: Sequence[int]) -> TimedOrders:
        rule = by_block(costs, self.spread, self.gap, self.lead * interval_of(costs))
        attempt = run(costs, limits, rule, self.patience)
        if attempt.makespan < inf or self.lead == inf:
            return attempt
        return self._replace(lead=inf).run(costs, limits)  # with no limit ahead, no rank gets stuck


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
    usual: Callable[[OpCosts], TimedOrders],
    costs: Costs | None,
    objective: Objective = "makespan",
) -> Schedule:
    """The schedule that `usual` makes for unit times; with `costs`, the best found for them.

    That is never longer, at these costs and by the objective, than the schedule for unit times.

    limits[r]: the most live activations of rank r, whatever the costs
    objective: which length of a step is to be small
    """
    check_objective(objective)
    unit = v_costs(ranks, microbatches, Costs())
    chosen = _repeated(usual, unit)
    if costs is not None:
        chosen = _formed(usual, chosen, limits, v_costs(ranks, microbatches, costs), objective)
    return schedule(name, unit, chosen.orders)


def _formed(
    usual: Callable[[OpCosts], TimedOrders],
    at_unit_times: TimedOrders,
    limits: Sequence[int],
    costs: OpCosts,
    objective: Objective,
) -> TimedOrders:
    """The best of many orders for `costs`, that `at_unit_times` among them."""

    def shortest(*variants: TimedOrders) -> TimedOrders:
        return min(variants, key=lambda variant: variant.length(objective))

    chosen = run(costs, limits, in_order(at_unit_times.orders), patience=None)
    if objective == "extent":
        chosen = shortest(chosen, run(costs, limits, ending_early(at_unit_times.orders), patience=None))
    sample = costs.first(2 * costs.ranks + 4)  # enough for all phases, few enough to try many
    affordable = max(1, _BUDGET // (6 * sample.ranks * sample.microbatches))
    tried = islice([usual, *_candidates(limits, at_unit_times)], affordable)
    best = min(tried, key=lambda candidate: candidate(sample).length(objective))
    chosen = shortest(chosen, best(costs))
    refined = _refined(chosen, limits, sample, min(affordable, _WALK), objective)
    return shortest(chosen, refined(costs))


_SETTLED = 3  # microbatches per rank after which the middle of every program is its steady state


def _repeated(rule: Callable[[OpCosts], TimedOrders], costs: OpCosts) -> TimedOrders:
    """``rule(costs)`` at unit times, from fewer microbatches and their steady state repeated.

    A run is deterministic: once every rank does the same in each interval, it does so until the microbatches
    run out. If some program shows no such interval in its middle, the rule runs on all microbatches.
    """
    few = costs.first(_SETTLED * costs.ranks)
    short_run, more = rule(few), costs.microbatches - few.microbatches
    middle = 3 * few.microbatches
    intervals = [lines[middle : middle + 6] for lines in short_run.orders]
    pairs = [*zip(short_run.orders, intervals, strict=True)]
    if not more:
        return short_run
    if any(lines[middle - 6 : middle] != interval or len({*interval}) < 6 for lines, interval in pairs):
        return rule(costs)
    longer = more * interval_of(costs)
    orders = [[*lines[:middle], *interval * more, *lines[middle:]] for lines, interval in pairs]
    return TimedOrders(short_run.makespan + longer, short_run.extent + longer, orders)


def _legs_in_order(
    usual: TimedOrders, limits: Sequence[int], patience: float | Patience, costs: OpCosts
) -> TimedOrders:
    """The order of the legs in `usual`, with W placed anew."""
    return run(costs, limits, in_order(_legs(usual, costs.microbatches)), patience)


def _legs(usual: TimedOrders, microbatches: int) -> Orders:
    legs = ((line for line in lines if line % 3 != W) for lines in usual.orders)
    return [[*of_the_first(microbatches, lines)] for lines in legs]


# few pairs that differ much: where W runs early or late decides what is left to fill the drain with
_PAIRS = ((0.5, 0.1), (1.0, 0.1), (0.1, 1.0), (0.25, 0.0), (0.1, 0.1))


def _refined(
    usual: TimedOrders, limits: Sequence[int], sample: OpCosts, tries: int, objective: Objective
) -> Callable[[OpCosts], TimedOrders]:
    """The order of the legs in `usual`, with a patience of each rank's own: the best of a random walk."""
    draw, patience = random.Random(0), [(0.5, 0.5)] * sample.ranks
    rule = in_order(_legs(usual, sample.microbatches))
    best = run(sample, limits, rule, patience).length(objective)
    for _ in range(tries):
        changed = patience.copy()
        changed[draw.randrange(sample.ranks)] = draw.choice(_PAIRS)
        length = run(sample, limits, rule, changed).length(objective)
        if length <= best:
            best, patience = length, changed
    return partial(_legs_in_order, usual, limits, patience)


def _candidates(limits: Sequence[int], usual: TimedOrders) -> Iterator[Callable[[OpCosts], TimedOrders]]:
    """The usual order of the legs with W placed for the costs; then blocks, in a fixed random order."""

    for patience in (0.0, 0.5, 1.0):
        yield partial(_legs_in_order, usual, limits, patience)
    for shape in random.Random(0).sample(_SHAPES, len(_SHAPES)):
        yield partial(shape.run, limits=limits)
