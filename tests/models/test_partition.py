from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError, PartitionError
from penstock.models.partition import even_split


@pytest.mark.parametrize(
    ("layers", "stages", "weights", "counts"),
    [
        (36, 2, (1, 1), [18, 18]),  # Qwen3-8B: 38 units, 19 a stage
        (32, 4, (1, 1), [8, 9, 8, 7]),  # 34 units: the first two stages take one more
        (32, 4, (0, 0), [8, 8, 8, 8]),
        (10, 4, (0, 0), [3, 3, 2, 2]),
        (4, 4, (1, 1), [1, 1, 1, 1]),  # the last stage's share would be the head alone
        (8, 2, (0, 4), [6, 2]),
        (3, 3, (5, 5), [1, 1, 1]),
        (1, 1, (1, 1), [1]),
    ],
)
def test_known_splits(layers: int, stages: int, weights: tuple[int, int], counts: list[int]) -> None:
    assert [len(part) for part in even_split(layers, stages, *weights)] == counts


@given(st.integers(1, 60), st.integers(1, 16), st.integers(0, 9), st.integers(0, 9))
def test_every_layer_once_in_order_and_none_empty(layers: int, stages: int, first: int, last: int) -> None:
    if stages > layers:
        with pytest.raises(PartitionError):
            even_split(layers, stages, first, last)
        return
    parts = even_split(layers, stages, first, last)
    assert [layer for part in parts for layer in part] == list(range(layers))
    assert all(len(part) for part in parts)
    units = [len(part) for part in parts]
    units[0] += first
    units[-1] += last
    if all(len(part) > 1 for part in parts):  # nobody had to be helped out
        assert max(units) - min(units) <= 1


def test_refusals() -> None:
    with pytest.raises(PartitionError, match=r"5 stages for 4 layers: .* Use at most 4 stages"):
        even_split(4, 5)
    with pytest.raises(ConfigError, match="head_weight=-1"):
        even_split(4, 2, 1, -1)
