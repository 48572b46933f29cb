"""List scheduling with look-ahead, by policies that are tried, kept and varied at random.

Whenever a rank is free it takes, among the ops that can run now or soon, the one with the highest score:

    score = base[line] - slope[line] * (ops of its line that are done) - wait * (how long the rank would idle)

`base` begins as the time left to the end of a microbatch; `slope` says
how much older microbatches come first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from operator import itemgetter
from random import Random

from penstock.schedule.dispatch import DispatchRule, DispatchState, F, I, Programs, W, dispatch
from penstock.schedule.op_arrays import NOTHING
from penstock.schedule.search.evaluate import Best, Key, key, times
from penstock.schedule.search.problem import OP_LISTED, OP_TIMED, Problem

_KEPT = 6  # policies that are varied


@dataclass(frozen=True)
class Policy:
    """How ops are scored. base, slope: by line; wait: see above; patience: quanta that a rank looks ahead.

    A policy fits any number of microbatches.
    """

    base: tuple[float, ...]
    slope: tuple[float, ...]
    wait: float
    patience: int


def list_schedules(best: Best, share: float, known: Sequence[Policy] = ()) -> list[Policy]:
    """Improve on `best`; returns the best policies. It tries at least the `known` ones and two more.

    It stops when `share` of the budget is spent, or when the least value is reached and nothing improves for
    long.
    """
    problem, random = best.problem, best.random
    kept: list[tuple[Key, Programs, Policy]] = []  # the best first
    room = reserves(problem)
    tried = idle = 0
    while tried < len(known) + 2 or best.budget.left(share) > 0:
        if tried < len(known):
            policy = known[tried]
        elif kept and random.random() < 0.7:
            _, _, policy = kept[min(int(random.expovariate(0.7)), len(kept) - 1)]
            policy = _varied(problem, policy, random)
        else:
            policy = _drawn(problem, random)
        tried += 1
        best.budget.spend(problem.size * (OP_LISTED + OP_TIMED))
        programs = follow(problem, policy, room)
        ends = times(problem, programs) if programs else None
        if not programs or not ends:
            continue
        new_key = key(problem, programs, ends)
        idle = 0 if not kept or new_key < kept[0][0] else idle + 1
        if all(new_key != other for other, _, _ in kept):
            kept = sorted([*kept, (new_key, programs, policy)], key=itemgetter(0))[:_KEPT]
        if kept[0][0].value <= best.least and idle > 300:
            break
    if kept:
        best.offer(kept[0][1], "list scheduling")
    return [policy for _, _, policy in kept]


def _drawn(problem: Problem, random: Random) -> Policy:
    """A random policy."""
    left = _time_left(problem)
    unit = problem.cycle / 3
    # a W waits until nothing else can run, or is an op like the others
    later = random.choice((0.0, 0.0, 6.0, -6.0, -60.0)) * unit
    noise = random.choice((0.0, 0.5, 1.0, 3.0)) * unit
    base = tuple(
        time + random.uniform(-noise, noise) + (later if line % 3 == W else 0.0)
        for line, time in enumerate(left)
    )
    slope = (random.uniform(0.2, 1.5) * problem.cycle,) * len(left)
    return Policy(base, slope, random.uniform(0.0, 3.0), int(random.choice((0.0, 0.0, 0.3, 0.6, 1.0)) * unit))


def _varied(problem: Problem, policy: Policy, random: Random) -> Policy:
    """A policy close to `policy`."""
    unit = problem.cycle / 3
    base, slope = list(policy.base), list(policy.slope)
    width = random.choice((0.1, 0.3, 1.0, 3.0)) * unit
    share = random.choice((1.0, 2.0, len(base) / 4, len(base))) / len(base)
    for line in range(len(base)):
        if random.random() < share:
            base[line] += random.gauss(0.0, width)
    if random.random() < 0.3:
        factor = random.uniform(0.7, 1.4)
        slope = [x * factor for x in slope]
    if random.random() < 0.2:
        at = random.randrange(len(slope))
        slope[at] *= random.uniform(0.8, 1.25)
    variant = replace(policy, base=tuple(base), slope=tuple(slope))
    if random.random() < 0.2:
        variant = replace(variant, wait=random.uniform(0.0, 3.0))
    if random.random() < 0.2:
        variant = replace(variant, patience=int(random.choice((0.0, 0.3, 0.6, 1.0)) * unit))
    return variant


def _time_left(problem: Problem) -> list[float]:
    """By line: from the start of one of its ops to the end of the same microbatch."""
    times = [duration + delay for duration, delay in zip(problem.duration, problem.delay, strict=True)]
    longest, depth = problem.by_line(max, times), problem.placement.depth
    remaining = [0.0] * len(longest)
    for first in range(0, problem.placement.stages, depth):
        left = 0.0
        for stage in range(first, first + depth):
            left += longest[3 * stage + I]
            remaining[3 * stage + I], remaining[3 * stage + W] = left, longest[3 * stage + W]
        for stage in reversed(range(first, first + depth)):
            left += longest[3 * stage + F]
            remaining[3 * stage + F] = left
    return remaining


def reserves(problem: Problem) -> list[int]:
    """By line: what must stay free after one of its ops has taken its memory.

    After an F that is room for one microbatch on the later stages of that rank. As microbatches keep their
    order on every stage, the oldest can then always finish, and no rank fills up.
    """
    room = [0] * len(problem.lines)
    for rank in range(problem.ranks):
        later = 0
        for stage in reversed(problem.placement.stages_of(rank)):
            room[3 * stage + F] = later
            later += max(
                (problem.take[n] + problem.take[n + I] for n in problem.lines[3 * stage + F]), default=0
            )
    return room


def follow(problem: Problem, policy: Policy, room: list[int]) -> Programs | None:
    """The programs that `policy` leads to; None if it gets stuck. room: from `reserves`."""
    state = dispatch(problem, _best_scored(problem, policy, room), policy.patience)
    return state.programs if state.is_complete else None


def _best_scored(problem: Problem, policy: Policy, room: list[int]) -> DispatchRule:
    base, slope, wait, patience = policy.base, policy.slope, policy.wait, policy.patience
    lines, lines_of, take, limits = problem.lines, problem.lines_of, problem.take, problem.limit

    def begin(state: DispatchState) -> Callable[[int, float], tuple[int, float]]:
        done, missing, ready_at, held = state.done, state.missing, state.ready_at, state.held

        def next_op(rank: int, now: float) -> tuple[int, float]:
            """One loop without a call: the search spends its time here."""
            best, highest, soonest = NOTHING, 0.0, inf
            limit = limits[rank] - held[rank]
            for line in lines_of[rank]:
                ops, at = lines[line], done[line]
                if at == len(ops):
                    continue
                op = ops[at]
                if missing[op] or take[op] + room[line] > limit:
                    continue
                score = base[line] - slope[line] * at
                idle = ready_at[op] - now
                if idle > 0:
                    if ready_at[op] < soonest:
                        soonest = ready_at[op]
                    if idle > patience:
                        continue
                    score -= wait * idle
                if best == NOTHING or score > highest:
                    best, highest = op, score
            return best, soonest

        return next_op

    return begin
