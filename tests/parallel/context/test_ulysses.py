"""How heads are distributed by ulysses; test_attention.py has its gradients."""

from __future__ import annotations

import pytest

from penstock.errors import ConfigError
from penstock.parallel.context.ulysses import repeats
from support.refusals import refuses


@pytest.mark.parametrize(
    ("heads", "key_heads", "count", "times"), [(8, 8, 4, 1), (8, 4, 2, 1), (8, 2, 4, 2), (8, 1, 8, 8)]
)
def test_key_heads_are_repeated_until_each_rank_has_those_of_its_heads(
    heads: int, key_heads: int, count: int, times: int
) -> None:
    assert repeats(heads, key_heads, count) == times
    assert key_heads * times % count == 0


@pytest.mark.parametrize(("heads", "key_heads", "count"), [(6, 6, 4), (12, 6, 4)])
def test_heads_that_cannot_be_distributed_are_refused(heads: int, key_heads: int, count: int) -> None:
    with refuses(ConfigError, f"cp={count} by ulysses", "heads", "or use the ring"):
        repeats(heads, key_heads, count)
