"""Mixtures: shares by weights, limits of epochs, and any place found without the way to it."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.train.data.sampler import Mixture, Sampler


def drawn(mixture: Mixture, count: int) -> str:
    return "".join("abc"[source] for source, _ in mixture.rows(0, count))


def test_the_drawing() -> None:
    assert drawn(Mixture((2.0, 1.0), (None, None)), 9) == "abaabaaba"
    assert drawn(Mixture((1.0, 0.0, 1.0), (None, None, None)), 6) == "acacac"
    assert drawn(Mixture((1.0, 1.0), (2, None)), 7) == "ababbbb"
    assert drawn(Mixture((1.0,), (None,)), 3) == "aaa"


WEIGHTS = st.lists(st.sampled_from([0.0, 0.1, 0.25, 0.7, 1.0, 3.0]), min_size=1, max_size=3).filter(any)


@given(weights=WEIGHTS, first=st.integers(0, 60), count=st.integers(1, 20), limit=st.integers(1, 40))
def test_any_part_is_that_of_the_whole(weights: list[float], first: int, count: int, limit: int) -> None:
    """Against the definition: the rows of all sources, sorted by their times."""
    last = max(source for source, weight in enumerate(weights) if weight)  # the others end
    limits = tuple(None if source == last else limit for source in range(len(weights)))
    times = sorted(
        ((2 * number + 1) / (2 * round(weight * 100)), source, number)
        for source, weight in enumerate(weights)
        if weight
        for number in range(2500 if limits[source] is None else limit)
    )
    expected = [(source, number) for _, source, number in times]
    mixture = Mixture(tuple(weights), limits)
    found = mixture.rows(first, count)
    assert mixture.rows(0, first + count)[first:] == found
    assert found == expected[first : first + count]


def test_shares_are_those_of_the_weights_and_a_far_place_is_found_at_once() -> None:
    mixture = Mixture((0.7, 0.2, 0.1), (None, None, None))
    counts = Counter(source for source, _ in mixture.rows(0, 1000))
    assert counts == {0: 700, 1: 200, 2: 100}
    far = mixture.rows(10**9, 10)
    assert Counter(source for source, _ in far) == {0: 7, 1: 2, 2: 1}
    assert far[0][1] == pytest.approx(0.7e9, abs=2)


def test_the_rows_of_all_limits_are_all_there_are() -> None:
    mixture = Mixture((1.0, 3.0, 0.0), (4, 6, None))
    assert mixture.total == 10
    rows = mixture.rows(0, 10)
    assert sorted(rows) == [(0, number) for number in range(4)] + [(1, number) for number in range(6)]
    assert Mixture((1.0, 1.0), (4, None)).total is None


def test_an_epoch_of_each_source_has_each_of_its_rows_once() -> None:
    sampler = Sampler(Mixture((2.0, 1.0), (None, None)), (6, 5), seed=3)
    rows = sampler.rows(0, 60)
    first, second = [row for row in rows if row < 6], [row for row in rows if row >= 6]
    for start in range(0, 36, 6):
        assert sorted(first[start : start + 6]) == [0, 1, 2, 3, 4, 5]
    for start in range(0, 20, 5):
        assert sorted(second[start : start + 5]) == [6, 7, 8, 9, 10]
    assert first[:6] != first[6:12]
    assert sampler.rows(17, 8) == rows[17:25]


def test_a_single_source_has_the_order_of_earlier_versions() -> None:
    """Up to 0.5.0 there was one source: resumed runs go on with its rows."""
    sampler = Sampler(Mixture((1.0,), (None,)), (9,), seed=5)
    expected = [int(np.random.default_rng((5, place // 9)).permutation(9)[place % 9]) for place in range(30)]
    assert sampler.rows(0, 30) == expected
