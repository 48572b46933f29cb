"""When each op runs: `simulate` on whole numbers, many thousand times a second.

Each program is in an order that its rank could follow if no other rank kept it waiting.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from penstock.schedule.dispatch import Programs
from penstock.schedule.op_arrays import NOTHING
from penstock.schedule.search.problem import Budget, Problem


class Key(NamedTuple):
    """The objective of a search: first the time that counts, then the sum of the ranks' ends."""

    value: int
    ends: int


_WORST = Key(2**62, 0)


def times(problem: Problem, programs: Programs) -> list[int] | None:
    """The end of each op, by number, and one more for NOTHING. None if the programs deadlock."""
    ends = [NOTHING] * problem.count + [0]  # needing NOTHING, the last one, holds nothing up
    return _run(problem, programs, ends, [0] * len(programs), [0] * len(programs))


def times_after(
    problem: Problem, programs: Programs, before: list[int], rank: int, at: int
) -> list[int] | None:
    """`times` after the program of `rank` has changed from position `at` on. before: the times until now.

    Only ops that start late enough to be affected run again.
    """
    duration = problem.duration
    since = before[programs[rank][at - 1]] if at else 0
    ends = before.copy()
    reached: list[int] = []
    free: list[int] = []
    for of, program in enumerate(programs):
        here = at if of == rank else bisect_left(program, since, key=lambda n: before[n] - duration[n])
        reached.append(here)
        free.append(before[program[here - 1]] if here else 0)
        for op in program[here:]:
            ends[op] = NOTHING
    return _run(problem, programs, ends, reached, free)


def _run(
    problem: Problem, programs: Programs, ends: list[int], reached: list[int], free: list[int]
) -> list[int] | None:
    need, delay, duration = problem.need, problem.delay, problem.duration
    waiting: dict[int, int] = {}  # an op that has not run -> the rank that stands waiting for it
    ready = list(range(len(programs)))
    while ready:
        rank = ready.pop()
        program, at, now = programs[rank], reached[rank], free[rank]
        for op in program[at:] if at else program:
            needed = need[op]
            there = ends[needed]
            if there < 0:
                waiting[needed] = rank
                break
            there += delay[op]
            now = (there if there > now else now) + duration[op]
            ends[op] = now
            at += 1
            if op in waiting:
                ready.append(waiting.pop(op))
        reached[rank], free[rank] = at, now
    return None if waiting else ends


def tails(problem: Problem, programs: Programs) -> list[int]:
    """By op: the time from its end until all that waits for it is done, less the offset of that rank.

    This is the same walk, backwards. The programs must not deadlock.
    """
    feeds, delay, duration = problem.feeds, problem.delay, problem.duration
    shift = max(problem.offset)
    remaining = [NOTHING] * problem.count + [0]
    places = [len(program) - 1 for program in programs]
    after = [shift - offset for offset in problem.offset]
    waiting: dict[int, int] = {}
    ready = list(range(len(programs)))
    while ready:
        rank = ready.pop()
        program, tail = programs[rank], after[rank]
        for at in range(places[rank], -1, -1):
            op = program[at]
            fed = feeds[op]
            there = remaining[fed]
            if there < 0:
                waiting[fed] = rank
                break
            if fed != NOTHING:
                there += duration[fed] + delay[fed]
                if there > tail:
                    tail = there
            remaining[op] = tail
            tail += duration[op]
            places[rank] = at - 1
            if op in waiting:
                ready.append(waiting.pop(op))
        after[rank] = tail
    return [tail - shift for tail in remaining]


def key(problem: Problem, programs: Programs, ends: list[int]) -> Key:
    """The key of programs that do not deadlock. ends: their `times`"""
    last = [ends[program[-1]] if program else 0 for program in programs]
    return Key(max(end - offset for end, offset in zip(last, problem.offset, strict=True)), sum(last))


def levels(problem: Problem, program: list[int]) -> list[int]:
    """The memory that the rank holds while each op of its program runs."""
    memory: list[int] = []
    kept = 0  # after the op before
    for op in program:
        memory.append(kept + problem.take[op])
        kept = memory[-1] - problem.give[op]
    return memory


def fits(problem: Problem, programs: Programs) -> bool:
    """Whether every rank stays within its limit."""
    return all(
        max(levels(problem, program), default=0) <= limit
        for program, limit in zip(programs, problem.limit, strict=True)
    )


def checked_key(problem: Problem, programs: Programs) -> Key:
    """The key; worse than any other for programs that deadlock or hold too much."""
    ends = times(problem, programs) if fits(problem, programs) else None
    return key(problem, programs, ends) if ends else _WORST


@dataclass
class Best:
    """The best programs so far and the step that found them; each step of a search improves on it.

    least: a lower bound on the value
    """

    problem: Problem
    random: Random
    budget: Budget
    least: int
    programs: Programs = field(default_factory=list)
    key: Key = _WORST
    method: str = ""

    def offer(self, programs: Programs | None, method: str) -> None:
        """Keep programs that run, fit and are better."""
        new_key = checked_key(self.problem, programs) if programs else _WORST
        if programs and new_key < self.key:
            self.programs, self.key, self.method = programs, new_key, method

    @property
    def is_least(self) -> bool:
        return self.key.value <= self.least
