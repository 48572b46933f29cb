"""Which search follows which.

    builders' schedules, and the same with W placed anew
    a smaller problem first where there are many ops: its policies, and its schedule with more of its steady state
    list scheduling
    up to 300 ops: CP-SAT on all of it, which may prove the best
    else: annealing, then CP-SAT on one window after the other
    what time is left: the same value, with ranks that end earlier
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from penstock.schedule.search import exact
from penstock.schedule.search.bound import lower_bound
from penstock.schedule.search.budget import CP_SAT_SECOND, OP_TIMED, Budget
from penstock.schedule.search.evaluate import Key, fits, key, times
from penstock.schedule.search.exact import Part
from penstock.schedule.search.listing import Policy, listed
from penstock.schedule.search.neighbours import annealed
from penstock.schedule.search.problem import Problem, Programs
from penstock.schedule.search.repeat import extended, fewer
from penstock.schedule.search.weights import replaced
from penstock.schedule.search.windows import improved

_ALL_AT_ONCE = 300  # ops that CP-SAT gets in one piece
_LARGE = 900  # ops from which on a smaller problem comes first


@dataclass
class Best:
    """The best programs so far, how they were found, and what is known of those that may be better."""

    problem: Problem
    least: int
    programs: Programs | None = None
    key: Key = Key(2**62, 0)
    method: str = "none"
    proven: bool = False
    policies: list[Policy] = field(default_factory=list)

    def offer(self, programs: Programs | None, method: str) -> None:
        ends = times(self.problem, programs) if programs and fits(self.problem, programs) else None
        if programs is None or ends is None:
            return
        found = key(self.problem, programs, ends)
        if found < self.key:
            self.programs, self.key, self.method = programs, found, method

    @property
    def is_least(self) -> bool:
        return self.key.value <= self.least


def find(problem: Problem, seeds: Sequence[tuple[str, Programs]], random: Random, budget: Budget) -> Best:
    """The best of the problem; one at least of the `seeds`, which are named, must fit."""
    best = Best(problem, lower_bound(problem))
    for name, programs in seeds:
        budget.spend(4 * OP_TIMED * problem.size)
        best.offer(programs, name)
        best.offer(replaced(problem, programs), f"{name} with W placed anew")
    assert best.programs is not None, "no seed fits"
    _from_smaller(best, random, budget)
    _improve(best, random, budget)
    return best


def _from_smaller(best: Best, random: Random, budget: Budget) -> None:
    """Half of the budget goes to the sizes with which a steady state begins."""
    problem = best.problem
    if problem.size <= _LARGE or not problem.alike or problem.placement.replicas > 1:
        return
    for size, share in ((problem.ranks + 3, 0.25), (2 * problem.ranks, 0.5)):
        if size >= problem.microbatches:
            continue
        small = fewer(problem, size)
        part = Best(small, lower_bound(small))
        found = listed(small, random, budget, share * 0.6, best.policies, part.least)
        part.policies = [each.policy for each in found]
        for each in found:
            part.offer(each.programs, "list scheduling")
            best.offer(extended(problem, small, each.programs, budget), "list scheduling, its steady state repeated")
        best.policies = part.policies + best.policies
        if part.programs is None:
            continue
        if exact.available():
            part.offer(improved(small, part.programs, random, budget, share, part.least), "windows")
        else:
            part.offer(annealed(small, part.programs, random, budget, share, part.least), "annealing")
        best.offer(extended(problem, small, part.programs, budget), f"{part.method}, its steady state repeated")


def _improve(best: Best, random: Random, budget: Budget) -> None:
    problem, small = best.problem, best.problem.size <= _ALL_AT_ONCE
    begun = budget.spent / budget.total
    rest = 1.0 - begun
    for found in listed(problem, random, budget, begun + 0.2 * rest, best.policies, best.least):
        best.offer(found.programs, "list scheduling")
    assert best.programs is not None
    if small and exact.available():
        _exactly(best, random, budget, begun + 0.7 * rest)
    if not (best.proven or best.is_least):
        # without OR-tools the annealing has all the time that there is
        share = begun + 0.45 * rest if exact.available() else 1.0
        best.offer(annealed(problem, best.programs, random, budget, share, best.least), "annealing")
    if exact.available():
        if small and (best.proven or best.is_least):
            seconds = budget.left() / CP_SAT_SECOND
            solved = exact.solve(problem, best.programs, Part.whole(best.programs), "ends", best.least, seconds,
                                 random.randrange(2**30), budget)  # fmt: skip
            best.offer(solved.programs, "CP-SAT")
        else:
            best.offer(improved(problem, best.programs, random, budget, 1.0, best.least), "windows of CP-SAT")
    elif best.is_least:
        best.offer(annealed(problem, best.programs, random, budget, 1.0, best.least), "annealing")


def _exactly(best: Best, random: Random, budget: Budget, share: float) -> None:
    if best.is_least or best.programs is None:
        return
    solved = exact.solve(
        best.problem, best.programs, Part.whole(best.programs), "value", best.least,
        budget.left(share) / CP_SAT_SECOND, random.randrange(2**30), budget,
    )  # fmt: skip
    best.offer(solved.programs, "CP-SAT")
    best.least = max(best.least, solved.bound)
    best.proven = solved.proven and best.key.value <= solved.bound
