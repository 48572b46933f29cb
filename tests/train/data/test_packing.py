"""Which documents share a row: nothing lost, nothing doubled, no row too long, and the same every time."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.train.data.packing import PACKINGS, Packing, best_fit, cut, one_each, sequential

CAPACITY = 8


def rows_in(packing: Packing) -> list[list[int]]:
    return [packing.row(number).tolist() for number in range(packing.size)]


def drawn(lengths: list[int], packing: Packing) -> list[str]:
    """Rows as in the module's drawing: one letter a token."""
    return ["".join("abcdefgh"[piece] * lengths[piece] for piece in row) for row in rows_in(packing)]


def test_the_drawing() -> None:
    pieces = cut(np.array([5, 10, 3, 3]), CAPACITY)
    assert pieces.starts.tolist() == [0, 5, 13, 15, 18]
    lengths = pieces.lengths.tolist()
    assert lengths == [5, 8, 2, 3, 3]  # a, b and the rest of b, c, d: here a to e
    assert drawn(lengths, one_each(pieces.lengths, CAPACITY)) == ["aaaaa", "bbbbbbbb", "cc", "ddd", "eee"]
    assert drawn(lengths, sequential(pieces.lengths, CAPACITY)) == ["aaaaa", "bbbbbbbb", "ccdddeee"]
    assert drawn(lengths, best_fit(pieces.lengths, CAPACITY)) == ["bbbbbbbb", "aaaaaddd", "eeecc"]


def test_a_single_token_is_a_piece_where_it_may_count() -> None:
    assert cut(np.array([1, 9, 0]), CAPACITY).lengths.tolist() == [8]
    assert cut(np.array([1, 9, 0]), CAPACITY, "truncate", shortest=1).lengths.tolist() == [1, 8]


@given(documents=st.lists(st.integers(0, 40), max_size=30), capacity=st.integers(2, 16))
def test_pieces_are_the_documents_but_for_single_tokens(documents: list[int], capacity: int) -> None:
    pieces = cut(np.array(documents, dtype=np.int64), capacity)
    tokens = [(number, at) for number, length in enumerate(documents) for at in range(length)]
    found = [
        tokens[start : start + length] for start, length in zip(pieces.starts, pieces.lengths, strict=True)
    ]
    for piece in found:
        assert 2 <= len(piece) <= capacity
        assert len({number for number, _ in piece}) == 1
        assert (
            len(piece) == capacity or piece[-1][1] == documents[piece[0][0]] - 1
        )  # cut only where it must be
    left_out = set(tokens) - {token for piece in found for token in piece}
    assert left_out == {
        (number, length - 1) for number, length in enumerate(documents) if length % capacity == 1
    }
    assert sum(map(len, found)) + len(left_out) == len(tokens)


@given(lengths=st.lists(st.integers(2, CAPACITY), max_size=40))
def test_every_piece_is_in_one_row_and_no_row_is_too_long(lengths: list[int]) -> None:
    for pack in PACKINGS.values():
        rows = rows_in(pack(np.array(lengths, dtype=np.int64), CAPACITY))
        assert sorted(piece for row in rows for piece in row) == list(range(len(lengths)))
        assert all(row and sum(lengths[piece] for piece in row) <= CAPACITY for row in rows)
        assert rows == rows_in(pack(np.array(lengths, dtype=np.int64), CAPACITY))


@given(lengths=st.lists(st.integers(2, CAPACITY), min_size=1, max_size=40))
def test_sequential_keeps_the_order_and_begins_a_row_only_where_it_must(lengths: list[int]) -> None:
    rows = rows_in(sequential(np.array(lengths, dtype=np.int64), CAPACITY))
    assert [piece for row in rows for piece in row] == list(range(len(lengths)))
    for before, after in pairwise(rows):
        assert sum(lengths[piece] for piece in before) + lengths[after[0]] > CAPACITY


@given(lengths=st.lists(st.integers(2, 50), min_size=1, max_size=60))
def test_best_fit_is_what_its_definition_says(lengths: list[int]) -> None:
    """Against the slow way: for each piece look at every row."""
    rows = rows_in(best_fit(np.array(lengths, dtype=np.int64), 50))
    free: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [row for row, left in enumerate(free) if left >= length]
        if fitting:
            free[min(fitting, key=lambda row: free[row])] -= length
        else:
            free.append(50 - length)
    assert sorted(50 - sum(lengths[piece] for piece in row) for row in rows) == sorted(free)


def test_a_hundred_thousand_documents_take_a_moment() -> None:
    lengths = np.random.default_rng(0).integers(2, 4097, 100_000)
    rows = best_fit(lengths, 4096)  # looking at every row for each would pass the test's time limit
    assert rows.size < 1.01 * lengths.sum() / 4096


def test_what_is_too_long_is_truncated_or_dropped() -> None:
    documents = np.array([5, 10, 1, 3])
    truncated, dropped = (cut(documents, CAPACITY, mode) for mode in ("truncate", "drop"))
    assert (truncated.starts.tolist(), truncated.lengths.tolist()) == ([0, 5, 16], [5, 8, 3])
    assert (dropped.starts.tolist(), dropped.lengths.tolist()) == ([0, 16], [5, 3])
