"""Annealing: one op at a time moves along its rank's program."""

from __future__ import annotations

from math import exp
from random import Random

from penstock.schedule.search.budget import OP_TIMED, Budget
from penstock.schedule.search.evaluate import key, levels, times, times_after
from penstock.schedule.search.problem import NOTHING, Problem, Programs

_FAR = 12  # positions that an op moves at most


def annealed(problem: Problem, programs: Programs, random: Random, budget: Budget, share: float, least: int) -> Programs:
    """`programs` or better, once `share` of the budget is spent.

    What is made small is the value plus a little of the ranks' ends: it tells apart what the value does not.
    """
    ends = times(problem, programs)
    assert ends is not None, "the programs given deadlock"
    current = [list(program) for program in programs]
    best, best_key = programs, key(problem, programs, ends)
    now = _score(problem, current, ends)
    first = budget.left(share)
    hot = 0.15 * problem.cycle
    tick = 0
    path = _critical(problem, current, ends)
    while (left := budget.left(share)) > 0 and first:
        tick += 1
        heat = hot * (left / first) ** 2 + 1e-9
        rank, at, to = _move(problem, current, path, random)
        program = current[rank]
        moved = _moved(problem, program, at, to)
        budget.spend(8)
        if moved is None:
            continue
        current[rank] = moved
        found = times_after(problem, current, ends, rank, min(at, to)) if False else times(problem, current)
        budget.spend(problem.size * OP_TIMED)
        score = _score(problem, current, found) if found else None
        if found is None or score is None or (score > now and random.random() >= exp((now - score) / heat)):
            current[rank] = program
            continue
        ends, now = found, score
        path = _critical(problem, current, ends)
        reached = key(problem, current, ends)
        if reached < best_key:
            best, best_key = [list(program) for program in current], reached
    return best


def _score(problem: Problem, programs: Programs, ends: list[int]) -> float:
    value, total = key(problem, programs, ends)
    return value + 0.3 * total / problem.ranks


def _critical(problem: Problem, programs: Programs, ends: list[int]) -> list[tuple[int, int]]:
    """(rank, position) of the ops that the value hangs on."""
    rank = max(range(problem.ranks), key=lambda r: (ends[programs[r][-1]] - problem.offset[r]) if programs[r] else 0)
    where = {number: at for at, number in enumerate(programs[rank])}
    places = {rank: where}
    at = len(programs[rank]) - 1
    path = []
    while True:
        path.append((rank, at))
        number = programs[rank][at]
        start = ends[number] - problem.duration[number]
        if at and ends[programs[rank][at - 1]] == start:
            at -= 1
            continue
        needed = problem.need[number]
        if needed == NOTHING or start == 0:
            return path
        rank = problem.rank_of[needed]
        if rank not in places:
            places[rank] = {n: i for i, n in enumerate(programs[rank])}
        at = places[rank][needed]


def _move(problem, programs, path, random):
    if random.random() < 0.7:
        rank, at = path[int(random.random() * len(path))]
    else:
        rank = int(random.random() * problem.ranks)
        at = int(random.random() * len(programs[rank]))
    far = 1 + int(random.expovariate(0.5))
    to = at + far if random.random() < 0.5 else at - far
    return rank, at, max(0, min(len(programs[rank]) - 1, to))


def _moved(problem: Problem, program: list[int], at: int, to: int) -> list[int] | None:
    """With the op at `at` moved towards `to`, as far as its line and its rank's own order allow."""
    number = program[at]
    line_of, need = problem.line_of, problem.need
    line = line_of[number]
    if to < at:
        stop = at
        while stop > to:
            other = program[stop - 1]
            if line_of[other] == line or (number % 3 and other == number - 1) or other == need[number]:
                break
            stop -= 1
        if stop == at: return None
        new = program[:stop] + [number] + program[stop:at] + program[at + 1:]
    else:
        stop = at
        fed = problem.feeds[number]
        while stop < to:
            other = program[stop + 1]
            if line_of[other] == line or (number % 3 != 2 and other == number + 1) or other == fed:
                break
            stop += 1
        if stop == at: return None
        new = program[:at] + program[at + 1: stop + 1] + [number] + program[stop + 1:]
    if max(levels(problem, new)) > problem.limit[problem.rank_of[number]]:
        return None
    return new
