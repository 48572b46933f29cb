"""Pairwise covering of a product that is too large to run: every pair of values of two factors occurs.

Most faults need one value or two to meet. Three factors of 16, 18 and 7 values have 2,016 combinations;
a covering array of some 300 rows has all of their pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest

Row = dict[str, Any]


def pairs(
    factors: Mapping[str, Sequence[Any]],
    allowed: Callable[[Row], bool] = lambda row: True,
    apart: Sequence[tuple[str, str]] = (),
) -> list[Row]:
    """Return rows, one value of each factor, in which every allowed pair occurs. Always the same rows.

    Greedy: each row begins with the first pair that is still missing, and then gives each other factor the
    value with which most missing pairs occur.

    Args:
        factors: the values of each factor, by its name
        allowed: may the values of this row meet? It also gets rows of some of the factors
        apart: two names each of factors whose pairs need not all occur
    """
    names = list(factors)
    skipped = {frozenset(each) for each in apart}
    missing: dict[tuple[str, int, str, int], None] = {
        (one, i, other, j): None
        for one, other in combinations(names, 2) if frozenset((one, other)) not in skipped
        for i, j in product(range(len(factors[one])), range(len(factors[other])))
    }  # fmt: skip
    rows: list[Row] = []
    turn = 0
    while missing:
        one, i, other, j = next(iter(missing))
        chosen = _filled({one: i, other: j}, factors, allowed, missing, turn)
        if chosen is None:  # these two never meet
            del missing[one, i, other, j]
            continue
        turn += 1
        for first, second in combinations(names, 2):
            missing.pop((first, chosen[first], second, chosen[second]), None)
        rows.append({name: factors[name][chosen[name]] for name in names})
    return rows


def every(step: int, cases: Iterable[Any]) -> list[Any]:
    """`cases` for a parametrization: each `step`-th is in the default run, the others are in the sweep."""
    found = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [
        pytest.param(*case, marks=[] if number % step == 0 else [pytest.mark.sweep])
        for number, case in enumerate(found)
    ]


def some(cases: Iterable[Any], *default: Any) -> list[Any]:
    """`cases` for a parametrization: those of `default` are in the default run, the others in the sweep."""
    return [pytest.param(case, marks=[] if case in default else [pytest.mark.sweep]) for case in cases]


def _filled(
    chosen: dict[str, int],
    factors: Mapping[str, Sequence[Any]],
    allowed: Callable[[Row], bool],
    missing: Mapping[tuple[str, int, str, int], None],
    turn: int,
) -> dict[str, int] | None:
    """Complete a row; None where no completion is allowed. Goes back on a choice that leads nowhere."""
    if not allowed({name: factors[name][index] for name, index in chosen.items()}):
        return None
    names = list(factors)
    open_factors = [name for name in names if name not in chosen]
    if not open_factors:
        return chosen
    name = open_factors[0]

    def gain(index: int) -> int:
        found = 0
        for other, theirs in chosen.items():
            first, second = sorted([(name, index), (other, theirs)], key=lambda each: names.index(each[0]))
            found += (*first, *second) in missing
        return found

    count = len(factors[name])
    for index in sorted(range(count), key=lambda index: (-gain(index), (index - turn) % count)):
        row = _filled({**chosen, name: index}, factors, allowed, missing, turn)
        if row is not None:
            return row
    return None
