"""What is proven, against trying everything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from random import Random

import pytest

from penstock.schedule import Costs, Placement, loop, wave
from penstock.schedule.search import search
from penstock.schedule.search.bound import lower_bound
from penstock.schedule.search.evaluate import fits, key, times
from penstock.schedule.search.exact import Part, solve
from penstock.schedule.search.problem import Budget, Problem, Programs, problem
from penstock.schedule.search.search import Objective

COSTS = [
    Costs(),
    Costs(1, 2, 1, communication=0.5),
    Costs(1, 1, 3),
    Costs([2, 1], 1, [1, 2], held_for_weight=0.5),
    Costs(1, [3, 1], 1, held_for_weight=0),
]


def orders(given: Problem, rank: int) -> Iterator[list[int]]:
    """Every program of the rank within its limit, each line in the order of the microbatches."""
    lines = [given.lines[line] for line in given.lines_of[rank]]

    def further(done: tuple[int, ...], held: int) -> Iterator[list[int]]:
        if all(count == len(line) for count, line in zip(done, lines, strict=True)):
            yield []
        for at, line in enumerate(lines):
            if done[at] == len(line) or (at % 3 and done[at - 1] <= done[at]):
                continue
            number = line[done[at]]
            now = held + given.take[number]
            if now <= given.limit[rank]:
                after = (*done[:at], done[at] + 1, *done[at + 1 :])
                yield from ([number, *rest] for rest in further(after, now - given.give[number]))

    return further((0,) * len(lines), 0)


@cache
def least(placement: Placement, microbatches: int, which: int, limit: float, from_first_op: bool) -> float:
    given = problem(placement, microbatches, COSTS[which], [limit] * placement.ranks, None, from_first_op)
    values = []
    for programs in product(*(list(orders(given, rank)) for rank in range(given.ranks))):
        found = list(programs)
        ends = times(given, found)
        if ends:
            values.append(key(given, found, ends).value)
    return min(values) * given.quantum


CASES = [
    *((loop(2), 3, which, limit) for which in range(len(COSTS)) for limit in (1.0, 2.0, 3.0)),
    *((wave(1), 2, which, limit) for which in range(len(COSTS)) for limit in (2.0, 3.0)),
    *((Placement((0, 1, 0)), 1, which, 2.0) for which in range(3)),
]


@pytest.mark.parametrize("objective", ["makespan", "extent"])
@pytest.mark.parametrize(("placement", "microbatches", "which", "limit"), CASES)
def test_proven_is_what_trying_everything_finds(
    placement: Placement, microbatches: int, which: int, limit: float, objective: Objective
) -> None:
    best = least(placement, microbatches, which, limit, objective == "extent")
    found = search(
        ranks=placement.ranks, microbatches=microbatches, costs=COSTS[which], memory_limit=limit,
        placement=placement, objective=objective, seconds=0.3,
    )  # fmt: skip
    assert found.optimal
    assert found.value == pytest.approx(best)
    assert found.lower_bound == pytest.approx(best)


@pytest.mark.parametrize(("placement", "microbatches", "which", "limit"), CASES)
def test_the_bound_without_ortools_is_below(
    placement: Placement, microbatches: int, which: int, limit: float
) -> None:
    for from_first_op in (False, True):
        given = problem(placement, microbatches, COSTS[which], [limit] * placement.ranks, None, from_first_op)
        best = least(placement, microbatches, which, limit, from_first_op)
        assert lower_bound(given) * given.quantum <= best + 1e-9


def serial(given: Problem) -> Programs:
    """One microbatch after the other, on one stage a rank."""
    return [sorted(ops, key=lambda number: number % given.row) for ops in given.ops_of]


def test_a_part_is_ordered_anew_and_the_rest_is_kept() -> None:
    given = problem(loop(3), 6, Costs(), [3.0] * 3)
    programs = serial(given)
    ends = times(given, programs)
    assert ends is not None
    part = Part([3, 3, 3], [12, 12, 12])
    solved = solve(given, programs, part, "value", 0, 1.0, 0, Budget(5))
    found = times(given, solved.programs)
    assert found is not None
    assert solved.proven
    assert fits(given, solved.programs)
    assert key(given, solved.programs, found).value == solved.bound < key(given, programs, ends).value
    for new, old in zip(solved.programs, programs, strict=True):
        assert (new[:3], new[12:]) == (old[:3], old[12:])


def test_ranks_that_keep_their_order_take_part() -> None:
    """What they do in the window depends on the ranks that are free: no order may be taken that deadlocks."""
    given = problem(wave(3), 5, Costs(1, 1.2, 0.8, communication=0.1), [9.0] * 3)
    programs = [
        [
            n
            for i in range(5)
            for n in sorted((o for o in ops if o % given.row // 3 == i), key=_out_and_back(given))
        ]
        for ops in given.ops_of
    ]
    random = Random(0)
    for _ in range(12):
        lengths = [len(program) for program in programs]
        starts = [random.randrange(length // 2) for length in lengths]
        part = Part([min(starts)] * 3, [min(starts) + 12] * 3, frozenset({random.randrange(3)}))
        programs = solve(given, programs, part, "both", 0, 0.1, 0, Budget(5)).programs
        assert times(given, programs)
        assert fits(given, programs)


def _out_and_back(given: Problem) -> Callable[[int], tuple[int, int]]:
    def place(number: int) -> tuple[int, int]:
        stage, kind = number // given.row, number % 3
        return (0, stage) if kind == 0 else (1, -2 * stage + (kind == 2))

    return place
