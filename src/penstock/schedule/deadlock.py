"""Cycles of ops that wait for one another across ranks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, pairwise

from penstock.schedule.ops import Op
from penstock.schedule.order import NOTHING, Walk
from penstock.schedule.standing import Standing
from penstock.schedule.violation import Violation


def deadlocks(standing: Standing, late: set[int]) -> Iterator[Violation]:
    """One violation for each cycle; overlapped ops wait together.

    late: ops (by number) that stand behind an op of their own rank that needs them

    These, and ops that are missing, have been reported. They count as done here, so that what is reported now
    is a deadlock of its own.
    """
    numbers, rank_at = standing.numbers, standing.rank_at
    needs = [numbers.needs(program) for program in standing.programs]
    absent = {n for n in chain.from_iterable(needs) if n != NOTHING and rank_at[n] == NOTHING}
    walk = Walk(numbers, standing.programs, needs, absent | late, _together(standing))
    for _ in walk:
        pass
    seen: set[int] = set()
    for start in sorted(walk.blocked):
        path: list[int] = []  # follow who waits for whom until a rank comes up again
        rank = start
        while rank not in seen and rank in walk.blocked:
            seen.add(rank)
            path.append(rank)
            rank = rank_at[walk.blocked[rank]]
        if rank in path:
            yield _cycle(standing, walk, path[path.index(rank) :])


def _together(standing: Standing) -> dict[int, int]:
    """What the first of two overlapped ops waits for besides: what the second needs."""
    programs, overlaps = standing.schedule.programs, standing.schedule.overlaps
    return {
        standing.programs[rank][at]: needed
        for rank, program in enumerate(programs if overlaps else ())
        for at, two in enumerate(pairwise(program))
        if two in overlaps
        if (needed := standing.numbers.needed(standing.programs[rank][at + 1])) != NOTHING
    }


def _cycle(standing: Standing, walk: Walk, ring: list[int]) -> Violation:
    """The deadlock of the ranks in `ring`, each standing at an op that waits for the next one's."""
    steps: list[str] = []
    ops: list[Op] = []
    for rank in ring:
        op, needed = _stands(standing, walk, rank)
        ops += [op, needed]
        steps.append(f"rank {rank} stands at {op}, which waits for {needed}")
    op, needed = _stands(standing, walk, ring[0])
    rule = "deadlock: " + "; ".join(steps) + f"; and {needed} comes only later on its rank"
    each_once = tuple(here for at, here in enumerate(ops) if here != ops[at - 1])  # awaited and stood at
    return Violation(rule, ring[0], walk.reached[ring[0]], op, needed, each_once)


def _stands(standing: Standing, walk: Walk, rank: int) -> tuple[Op, Op]:
    """The op that `rank` stands at, and the one that it waits for."""
    return standing.schedule.programs[rank][walk.reached[rank]], standing.op(walk.blocked[rank])
