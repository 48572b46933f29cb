"""Which search follows which.

    1  the builders' schedules, each also with W placed anew
    2  where there are many ops: a smaller problem, for its policies and for a steady state to repeat
    3  list scheduling
    4  small cases: CP-SAT on all of it, which may prove the best; others: annealing
    5  CP-SAT on one window after the other; once nothing can be better, for ranks that end early

Without OR-tools annealing takes the place of CP-SAT. Each step starts from the best before it and is given
a share of the budget that is reckoned from its beginning, so that what one leaves the next ones have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from penstock.schedule.search import exact
from penstock.schedule.search.bound import lower_bound
from penstock.schedule.search.budget import CP_SAT_SECOND, OP_TIMED, Budget
from penstock.schedule.search.evaluate import Key, fits, key, times
from penstock.schedule.search.exact import Aim, Part
from penstock.schedule.search.listing import Policy, listed
from penstock.schedule.search.neighbours import annealed
from penstock.schedule.search.problem import Problem, Programs
from penstock.schedule.search.repeat import extended, fewer
from penstock.schedule.search.weights import replaced
from penstock.schedule.search.windows import improved

# ops that CP-SAT gets in one piece; more where each rank has one stage: the limit is a matter of order then
_ALL_AT_ONCE, _ALL_AT_ONCE_SINGLY = 400, 700
_LARGE = 900  # ops from which on a smaller problem comes first


_WORST = Key(2**62, 0)


@dataclass
class Best:
    """The best programs so far and what found them; no programs have a smaller value than `least`."""

    problem: Problem
    random: Random
    budget: Budget
    least: int
    programs: Programs = field(default_factory=list)
    key: Key = _WORST
    method: str = ""

    def offer(self, programs: Programs | None, method: str) -> None:
        """Take them if they run, fit and are better."""
        ends = times(self.problem, programs) if programs and fits(self.problem, programs) else None
        if programs is None or ends is None:
            return
        found = key(self.problem, programs, ends)
        if found < self.key:
            self.programs, self.key, self.method = programs, found, method

    @property
    def is_least(self) -> bool:
        return self.key.value <= self.least

    def list(self, share: float, known: Sequence[Policy], name: str = "list scheduling") -> list[Policy]:
        """The policies that have proved best, after `share` of the budget."""
        found = listed(self.problem, self.random, self.budget, share, known, self.least)
        for each in found:
            self.offer(each.programs, name)
        return [each.policy for each in found]

    def anneal(self, share: float) -> None:
        found = annealed(self.problem, self.programs, self.random, self.budget, share, self.least)
        self.offer(found, "annealing")

    def window(self, share: float) -> None:
        found = improved(self.problem, self.programs, self.random, self.budget, share, self.least)
        self.offer(found, "CP-SAT on windows")

    def solve(self, aim: Aim, share: float) -> None:
        """All of it by CP-SAT."""
        seconds = self.budget.left(share) / CP_SAT_SECOND
        if seconds <= 0:
            return
        whole = Part.whole(self.programs)
        seed = self.random.randrange(2**30)
        solved = exact.solve(self.problem, self.programs, whole, aim, self.least, seconds, seed, self.budget)
        self.offer(solved.programs, "CP-SAT")
        # another way to deal the microbatches out to the copies of the model may be better
        if self.problem.exact_sizes and self.problem.placement.replicas == 1:
            self.least = max(self.least, solved.bound)


def find(problem: Problem, seeds: Sequence[tuple[str, Programs]], random: Random, budget: Budget) -> Best:
    """The best programs; one at least of the `seeds`, which are named, must fit."""
    best = Best(problem, random, budget, lower_bound(problem))
    for name, programs in seeds:
        budget.spend(4 * OP_TIMED * problem.size)
        best.offer(programs, name)
        best.offer(replaced(problem, programs), f"{name} with W placed anew")
    assert best.programs, "no seed fits"
    policies: list[Policy] = []
    if problem.size > _LARGE and problem.alike and problem.placement.replicas == 1:
        for microbatches, share in ((problem.ranks + 3, 0.1), (2 * problem.ranks, 0.2)):
            if microbatches < problem.microbatches:
                policies += _from_fewer(best, microbatches, share, policies)
    _improve(best, policies)
    return best


def _from_fewer(best: Best, microbatches: int, share: float, policies: list[Policy]) -> list[Policy]:
    """Search with fewer microbatches and repeat the steady state of what comes out. Returns its policies."""
    problem, budget = best.problem, best.budget
    few = fewer(problem, microbatches)
    part = Best(few, best.random, budget, lower_bound(few))
    begun = budget.spent / budget.total
    policies = part.list(begun + 0.5 * (share - begun), policies)
    if not part.programs:
        return policies
    best.offer(extended(problem, few, part.programs, budget), "list scheduling, its steady state repeated")
    if exact.available():
        part.window(share)
    else:
        part.anneal(share)
    best.offer(extended(problem, few, part.programs, budget), f"{part.method}, its steady state repeated")
    return policies


def _improve(best: Best, policies: list[Policy]) -> None:
    begun = best.budget.spent / best.budget.total
    singly = best.problem.placement.stages == best.problem.ranks
    whole = best.problem.size <= (_ALL_AT_ONCE_SINGLY if singly else _ALL_AT_ONCE)

    def until(share: float) -> float:
        return begun + share * (1.0 - begun)

    best.list(until(0.2 if whole else 0.35), policies)
    if not exact.available():
        best.anneal(1.0)
        return
    if whole and not best.is_least:
        best.solve("value", until(0.7))
    if not best.is_least and best.problem.size <= _LARGE:  # of more ops, too few would move to tell
        best.anneal(until(0.8 if whole else 0.55))
    if whole and best.is_least:
        best.solve("ends", 1.0)
    else:
        best.window(1.0)
