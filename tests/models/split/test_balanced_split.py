"""The balanced split is the best of all, or close to it."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError, PartitionError
from penstock.models.split.balanced_split import LayerCosts, Memory, balanced_split
from penstock.models.split.partition import even_split, to_layout
from support.layer_counts import counts, numbers, split_as
from support.refusals import refuses


def every_split(layers: int, stages: int) -> list[list[range]]:
    cuts = itertools.combinations_with_replacement(range(layers + 1), stages - 1)
    return [[range(a, b) for a, b in itertools.pairwise((0, *inner, layers))] for inner in cuts]


def stage_sums(split: list[range], layers: list[float], first: float, last: float) -> list[Fraction]:
    sums = [sum((Fraction(layers[layer]) for layer in part), Fraction()) for part in split]
    sums[0] += Fraction(first)
    sums[-1] += Fraction(last)
    return sums


@settings(deadline=None)  # all splits there are
@given(st.data(), st.lists(numbers, min_size=1, max_size=7), st.integers(1, 5), numbers, numbers)
def test_balanced_is_the_best_of_all(
    data: st.DataObject, costs: list[float], stages: int, first: float, last: float
) -> None:
    weights = data.draw(st.lists(st.integers(0, 4), min_size=len(costs), max_size=len(costs)))
    saved = data.draw(st.lists(st.integers(0, 4), min_size=len(costs), max_size=len(costs)))
    live = data.draw(st.lists(st.integers(1, 4), min_size=stages, max_size=stages))
    memory = data.draw(st.none() | st.integers(0, 40).map(
        lambda limit: Memory(limit, weights, saved, live, (3, 1), (2, 2))))  # fmt: skip

    def rank(split: list[range]) -> tuple[object, ...]:
        sums = stage_sums(split, costs, first, last)
        return max(sums), sum(one * one for one in sums), [len(part) for part in split]

    def held(split: list[range]) -> Fraction:
        fixed = stage_sums(split, [*map(float, weights)], 3, 2)
        each = stage_sums(split, [*map(float, saved)], 1, 2)
        return max(a + b * count for a, b, count in zip(fixed, each, live, strict=True))

    possible = every_split(len(costs), stages)
    fitting = [split for split in possible if memory is None or held(split) <= memory.limit]
    if fitting:
        found = balanced_split(LayerCosts(costs, first, last), stages, memory=memory)
        assert found == min(fitting, key=rank)
    else:
        least = min(map(held, possible))
        with refuses(PartitionError, "memory.limit=", f"holds {least} or more", f"Give {least} or more"):
            balanced_split(LayerCosts(costs, first, last), stages, memory=memory)


@pytest.mark.parametrize(
    ("costs", "stages", "ends", "layout"),
    [
        ([1] * 8, 4, (0, 0), "E(tt|)*3ttL"),
        ([1] * 10, 4, (0, 0), "Ett|tt|t*3|t*3L"),  # later stages hold fewer microbatches
        ([1] * 8, 4, (0, 3), "Ett|t*3|t*3|L"),  # the head counts as much as three layers
        ([0.1] * 9, 3, (0, 0), "Et*3|t*3|t*3L"),  # 0.1 + 0.1 + 0.1 is no 0.3 in floating point
        ([1, 1], 4, (0, 0), "E||t|tL"),
        ([], 2, (1, 1), "E|L"),
    ],
)
def test_known_balances(costs: list[float], stages: int, ends: tuple[float, float], layout: str) -> None:
    split = balanced_split(LayerCosts(costs, *ends), stages)
    assert to_layout(split) == layout


LOOP, V = (0, 1, 0, 1), (0, 1, 1, 0)


TWO = LayerCosts([1, 1])


@pytest.mark.parametrize("rank_of", [LOOP, V])
@pytest.mark.parametrize("head", [0, 10, 155])
@pytest.mark.parametrize("costs", [[24] * 12, [20] * 3 + [31] * 13, [28, 45] * 8])
def test_the_slowest_of_ranks_with_two_stages_is_within_2_percent_of_the_best(
    costs: list[int], head: int, rank_of: tuple[int, ...]
) -> None:
    """Version 0.5.0 gave the ranks of a V 2 and 4 of 6 layers: it looked at stages, not at ranks."""

    def slowest(split: list[range]) -> float:
        sums = stage_sums(split, [*map(float, costs)], 0, head)
        return float(max(sum(s for s, r in zip(sums, rank_of, strict=True) if r == rank) for rank in (0, 1)))

    found = balanced_split(LayerCosts(costs, head=head), 4, holders=[(rank,) for rank in rank_of])
    assert slowest(found) <= 1.02 * min(map(slowest, every_split(len(costs), 4)))


def test_both_copies_of_dualpipe_count() -> None:
    """A rank holds one stage of each copy: the first and the last, or two in the middle."""
    split = balanced_split(LayerCosts([1] * 12, head=4), 4, holders=[(0, 3), (1, 2), (2, 1), (3, 0)])
    costs = [len(layers) + 4 * (stage == 3) for stage, layers in enumerate(split)]
    assert costs[0] + costs[3] == costs[1] + costs[2]


@pytest.mark.parametrize(
    ("layers", "memory", "expected"),
    [
        (12, Memory(30, [1] * 12, [2] * 12, [4, 3, 2, 1]), [3, 3, 3, 3]),
        (12, Memory(18, [1] * 12, [2] * 12, [4, 3, 2, 1]), [2, 2, 3, 5]),
        (6, Memory(0.9, [0.1] * 6, [0.1] * 6, [2.5, 1.0]), [2, 4]),  # type: ignore[list-item]  # means
    ],
)
def test_early_stages_take_fewer_layers_where_they_hold_more_microbatches(
    layers: int, memory: Memory, expected: list[int]
) -> None:
    assert counts(balanced_split(LayerCosts([1] * layers), len(expected), memory=memory)) == expected


@pytest.mark.timeout(60)
@pytest.mark.parametrize("head", [5.0, 900.0])
def test_200_layers_on_64_stages_are_balanced_soon(head: float) -> None:
    """It takes 0.1 to 1 s; a search over all splits would take for ever."""
    costs = [1 + 0.37 * (layer * 7919 % 13) for layer in range(200)]
    memory = Memory(1e12, costs, costs, list(range(64, 0, -1)))
    assert sum(counts(balanced_split(LayerCosts(costs, head=head), 64, memory=memory))) == 200


@pytest.mark.parametrize(
    ("call", "value", "rule"),
    [
        (lambda: even_split(4, 2, 1, -1), "head_weight=-1", "counts layers"),
        (lambda: split_as(4, 2, balance=[1, 2, 3]), "costs of 3 layers", "model has 4"),
        (lambda: split_as(4, 2, layers_per_stage=0), "layers_per_stage=0", "at least one layer"),
        (lambda: split_as(4, 2, layers_per_stage=[-1, 5]), "layers_per_stage=[-1, 5]", "0 layers or more"),
        (lambda: split_as(4, 2, first_stage_layers=-1), "first_stage_layers=-1", "0 layers or more"),
        (lambda: balanced_split(LayerCosts([1, -1]), 2), "costs with -1", "finite number"),
        (lambda: balanced_split(LayerCosts([1, float("nan")]), 2), "costs with nan", "finite number"),
        (lambda: balanced_split(LayerCosts([1]), 0), "stages=0", "at least one"),
        (
            lambda: balanced_split(LayerCosts([1], head=float("inf")), 2),
            "embedding and costs.head with inf",
            "finite number",
        ),
        (
            lambda: balanced_split(TWO, 2, memory=Memory(9, [1])),
            "memory.weights of 1 numbers",
            "for each layer, so 2",
        ),
        (
            lambda: balanced_split(TWO, 2, memory=Memory(9, [1, 1], [1])),
            "memory.activations of 1 numbers",
            "for each layer, so 2",
        ),
        (
            lambda: balanced_split(TWO, 2, memory=Memory(9, [1, 1], live=[1])),
            "memory.live of 1 numbers",
            "for each stage, so 2",
        ),
    ],
)
def test_numbers_that_are_refused(call: Any, value: str, rule: str) -> None:
    with refuses(ConfigError, value, rule):
        call()
