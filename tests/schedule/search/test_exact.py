"""What is proven, against trying everything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from random import Random

import pytest

from penstock.schedule import Costs, Placement, loop, wave
from penstock.schedule.dispatch import Programs
from penstock.schedule.search import search
from penstock.schedule.search.bound import lower_bound
from penstock.schedule.search.evaluate import Best, fits, key, times
from penstock.schedule.search.exact import Part, solve
from penstock.schedule.search.problem import Budget, Problem, problem
from support.covering import Row, every, pairs

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


def least(given: Problem) -> float:
    """By trying everything."""
    values = []
    for programs in product(*(list(orders(given, rank)) for rank in range(given.ranks))):
        ends = times(given, list(programs))
        if ends:
            values.append(key(given, list(programs), ends).value)
    return min(values) * given.quantum


MICROBATCHES = {loop(2): 3, wave(1): 2, Placement((0, 1, 0)): 1}


def exists(row: Row) -> bool:
    """A rank holds an activation of each of its stages at least; some costs are of two stages."""
    placement = row.get("placement", loop(2))
    costs_of_any = row.get("costs", Costs()) in COSTS[:3]
    return (placement == loop(2) or row.get("limit", 2.0) >= 2) and (placement.stages == 2 or costs_of_any)


CASES = pairs({
    "placement": [*MICROBATCHES], "costs": COSTS, "limit": [1.0, 2.0, 3.0],
    "objective": ["makespan", "extent"],
}, exists)  # fmt: skip


@pytest.mark.parametrize("case", every(2, CASES))
def test_proven_is_what_trying_everything_finds(case: Row) -> None:
    placement, costs, limit, objective = case.values()
    count, ranks = MICROBATCHES[placement], placement.ranks
    given = problem(placement, count, costs, [limit] * ranks, None, objective == "extent")
    best = least(given)
    found = search(
        ranks=ranks, microbatches=count, costs=costs, memory_limit=limit, placement=placement,
        objective=objective, seconds=0.3,
    )  # fmt: skip
    assert found.optimal
    assert found.value == pytest.approx(best)
    assert found.lower_bound == pytest.approx(best)
    assert lower_bound(given) * given.quantum <= best + 1e-9  # which needs no OR-tools


def serial(given: Problem) -> Programs:
    """One microbatch after the other, on one stage a rank."""
    return [sorted(ops, key=lambda number: number % given.row) for ops in given.ops_of]


def test_a_part_is_ordered_anew_and_the_rest_is_kept() -> None:
    given = problem(loop(3), 6, Costs(), [3.0] * 3)
    programs = serial(given)
    ends = times(given, programs)
    assert ends is not None
    part = Part([3, 3, 3], [12, 12, 12])
    solved = solve(Best(given, Random(0), Budget(5), least=0), programs, part, "value", 1.0)
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
    programs = [sorted(ops, key=_one_after_the_other(given)) for ops in given.ops_of]
    random = Random(0)
    for _ in range(12):
        lengths = [len(program) for program in programs]
        starts = [random.randrange(length // 2) for length in lengths]
        part = Part([min(starts)] * 3, [min(starts) + 12] * 3, frozenset({random.randrange(3)}))
        programs = solve(Best(given, random, Budget(5), least=0), programs, part, "both", 0.1).programs
        assert times(given, programs)
        assert fits(given, programs)


def _one_after_the_other(given: Problem) -> Callable[[int], tuple[int, ...]]:
    """Each microbatch out and back."""

    def place(number: int) -> tuple[int, ...]:
        stage, within = divmod(number, given.row)
        microbatch, kind = divmod(within, 3)
        return (microbatch, 0, stage) if kind == 0 else (microbatch, 1, -2 * stage + (kind == 2))

    return place
