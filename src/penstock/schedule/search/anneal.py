"""Annealing: one op at a time moves within the program of its rank. And `replaced`: W placed anew."""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from math import exp
from random import Random

from penstock.schedule.dispatch import F, Programs, W
from penstock.schedule.op_arrays import NOTHING
from penstock.schedule.search.evaluate import Best, Key, key, levels, times, times_after
from penstock.schedule.search.problem import OP_TIMED, Problem


def replaced(problem: Problem, programs: Programs) -> Programs | None:
    """Move each W to where its rank would wait otherwise, or must free memory; None if that gets stuck.

    F and I keep their order. A W does not start if the next op is ready before half of that W is done.
    """
    need, delay, duration = problem.need, problem.delay, problem.duration
    main = [[op for op in program if op % 3 != W] for program in programs]
    placed: Programs = [[] for _ in programs]
    put_off: list[deque[int]] = [deque() for _ in programs]
    ends = [NOTHING] * problem.count
    at, memory = [0] * len(programs), [0] * len(programs)
    waiting: dict[int, int] = {}
    queue = [(0, rank) for rank in range(len(programs))]
    while queue:
        now, rank = heappop(queue)
        weights, soon = put_off[rank], NOTHING
        op = main[rank][at[rank]] if at[rank] < len(main[rank]) else NOTHING
        if op != NOTHING and memory[rank] + problem.take[op] <= problem.limit[rank]:
            needed = need[op]
            if needed == NOTHING or ends[needed] != NOTHING:
                soon = now if needed == NOTHING else max(now, ends[needed] + delay[op])
        if weights and (soon == NOTHING or soon - now > duration[weights[0]] / 2):
            op = weights.popleft()
            soon = now
        elif soon == NOTHING:
            if op != NOTHING:
                waiting[need[op]] = rank
            continue
        else:
            at[rank] += 1
        ends[op] = end = soon + duration[op]
        placed[rank].append(op)
        memory[rank] += problem.take[op] - problem.give[op]
        if op % 3 == 1:
            weights.append(op + 1)
        heappush(queue, (end, rank))
        if op in waiting:
            heappush(queue, (now, waiting.pop(op)))
    return placed if all(len(new) == len(old) for new, old in zip(placed, programs, strict=True)) else None


ProgramPosition = tuple[int, int]  # rank, position

_ENDS_WEIGHT = 0.3  # weight of the mean of the ranks' ends, which orders programs of equal value
_HEAT = 0.15  # at the beginning, in cycles
_ON_THE_PATH = 0.7  # share of the moves that are of a critical op


def anneal(best: Best, share: float) -> None:
    """Improve on `best` until `share` of the budget is spent."""
    problem, random, budget = best.problem, best.random, best.budget

    def score(reached: Key) -> float:
        return max(reached.value, best.least) + _ENDS_WEIGHT * reached.ends / problem.ranks

    current, ends = list(best.programs), times(problem, best.programs)
    assert ends is not None, "the programs deadlock"
    now, path = score(best.key), _critical(problem, current, ends)
    steps = max(1.0, budget.left(share))
    while (left := budget.left(share)) > 0:
        heat = _HEAT * problem.cycle * (left / steps) ** 2
        rank, at, to = _drawn(problem, current, path, random)
        old = current[rank]
        new = _moved(problem, old, at, to)
        budget.spend(0.2 * len(old) + 10)
        if new is None:
            continue
        budget.spend(0.7 * OP_TIMED * problem.size)
        current[rank] = new
        new_ends = times_after(problem, current, ends, rank, _first_difference(old, new, min(at, to)))
        threshold = random.random()  # drawn in any case, so that later draws do not depend on the score
        if new_ends is not None:
            reached = key(problem, current, new_ends)
            change = score(reached) - now
            if change <= 0 or threshold < exp(-change / (heat + 1e-9)):
                ends, now, path = new_ends, score(reached), _critical(problem, current, new_ends)
                if reached < best.key:
                    best.offer(list(current), "annealing")
                continue
        current[rank] = old


def _first_difference(old: list[int], new: list[int], since: int) -> int:
    return next(at for at in range(since, len(old)) if old[at] != new[at])


def _critical(problem: Problem, programs: Programs, ends: list[int]) -> list[ProgramPosition]:
    """The chain of ops that determines the value, the last first."""
    rank = max(
        (rank for rank in range(problem.ranks) if programs[rank]),
        key=lambda rank: ends[programs[rank][-1]] - problem.offset[rank],
    )
    at = len(programs[rank]) - 1
    path: list[ProgramPosition] = []
    while True:
        path.append((rank, at))
        op = programs[rank][at]
        start = ends[op] - problem.duration[op]
        needed = problem.need[op]
        if at and ends[programs[rank][at - 1]] == start:
            at -= 1
        elif needed == NOTHING or not start:
            return path
        else:
            rank = problem.rank_of[needed]
            at = programs[rank].index(needed)


def _drawn(
    problem: Problem, programs: Programs, path: list[ProgramPosition], random: Random
) -> tuple[int, int, int]:
    """The rank, position and target of a random move; more often of a critical op, more often a short one."""
    if random.random() < _ON_THE_PATH:
        rank, at = random.choice(path)
    else:
        rank = random.randrange(problem.ranks)
        at = random.randrange(max(1, len(programs[rank])))
    far = 1 + int(random.expovariate(0.5))
    to = at + far if random.random() < 0.5 else at - far
    return rank, at, max(0, min(len(programs[rank]) - 1, to))


def _moved(problem: Problem, program: list[int], at: int, to: int) -> list[int] | None:
    """Move the op at `at` towards `to`, as far as its line and its microbatch allow.

    None if it cannot move at all, or if the rank would hold too much.
    """
    if not program:
        return None
    op, line_of = program[at], problem.line_of
    back = to < at
    # it must not pass the op of its own stage that it needs or feeds, nor that of the neighbouring stage
    kind = op % 3
    own = (op - 1 if kind != F else NOTHING) if back else (op + 1 if kind != W else NOTHING)
    kin = (own, problem.need[op] if back else problem.feeds[op])
    step, stop = (-1, at) if back else (1, at)
    while stop != to:
        other = program[stop + step]
        if line_of[other] == line_of[op] or other in kin:
            break
        stop += step
    if stop == at:
        return None
    moved = program.copy()
    del moved[at]
    moved.insert(stop, op)
    return moved if max(levels(problem, moved)) <= problem.limit[problem.rank_of[op]] else None
