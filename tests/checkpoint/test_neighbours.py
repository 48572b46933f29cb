"""Which rank keeps whose shard."""

from __future__ import annotations

import pytest

from penstock.checkpoint.neighbours import keepers


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ("a", [None]),
        ("aa", [None, None]),
        ("ab", [1, 0]),
        ("aabb", [2, 3, 0, 1]),
        ("abab", [1, 0, 3, 2]),
        ("aaab", [3, 3, 3, 0]),
        ("abc", [1, 2, 0]),
    ],
)
def test_each_rank_has_its_copies_on_the_next_host(hosts: str, expected: list[int | None]) -> None:
    assert keepers(hosts) == expected
