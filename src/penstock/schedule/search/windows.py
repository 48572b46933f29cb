"""Large-neighbourhood search: a window of the schedule at a time is ordered anew by CP-SAT, all else kept."""

from __future__ import annotations

from bisect import bisect_left
from random import Random

from penstock.schedule.search.budget import CP_SAT_SECOND, Budget
from penstock.schedule.search.evaluate import Key, fits, key, times
from penstock.schedule.search.exact import Part, solve
from penstock.schedule.search.problem import Problem, Programs

_SECONDS = 0.15  # deterministic, for one window
_FIRST, _FEWEST, _MOST = 60.0, 24.0, 240.0  # ops in a window
_GIVEN_UP = 60  # windows in a row that changed nothing


def improved(
    problem: Problem, programs: Programs, random: Random, budget: Budget, share: float, least: int
) -> Programs:
    """`programs` or better, once `share` of the budget is spent."""
    best, best_key = programs, _key(problem, programs)
    size, idle = _FIRST, 0
    while budget.left(share) > 0 and idle < _GIVEN_UP:
        part = _window(problem, best, size, random)
        seconds = min(_SECONDS, budget.left(share) / CP_SAT_SECOND)
        solved = solve(problem, best, part, "both", least, seconds, random.randrange(2**30), budget)
        # windows grow until they cannot be searched out
        size = min(_MOST, size * 1.08) if solved.proven else max(_FEWEST, size * 0.85)
        found = _key(problem, solved.programs)
        idle = 0 if found < best_key else idle + 1
        # as good in another order is taken too: the next window starts from elsewhere
        if found <= best_key:
            best, best_key = solved.programs, found
    return best


def _key(problem: Problem, programs: Programs) -> Key:
    """Beyond all others where ops that take no time have come in an order that does not run."""
    ends = times(problem, programs) if fits(problem, programs) else None
    return key(problem, programs, ends) if ends else Key(2**62, 0)


def _window(problem: Problem, programs: Programs, size: float, random: Random) -> Part:
    """What starts within a stretch of time. Neighbouring ranks are free there, about `size` ops of theirs."""
    ends, duration = times(problem, programs), problem.duration
    assert ends is not None, "the programs given deadlock"
    ranks = problem.ranks
    wide = ranks if random.random() < 0.5 else random.randint(min(2, ranks), ranks)
    lowest = random.randint(0, ranks - wide)
    makespan = max(ends)
    length = makespan * size / problem.size * ranks / wide
    begin = random.uniform(-0.5 * length, makespan - 0.5 * length)

    def place(program: list[int], time: float) -> int:
        return bisect_left(program, time, key=lambda number: ends[number] - duration[number])

    return Part(
        [place(program, begin) for program in programs],
        [place(program, begin + length) for program in programs],
        frozenset(range(ranks)).difference(range(lowest, lowest + wide)),
    )
