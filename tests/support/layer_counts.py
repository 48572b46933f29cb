"""Layers of a split, as counts."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from penstock.models.split.partition import partition
from penstock.options import SplitOptions


def split_as(
    layers: int, stages: int, balance: Any = None, prediction_layers: int = 0, **said: Any
) -> list[range]:
    return partition(
        layers, stages, SplitOptions(**said), balance=balance, prediction_layers=prediction_layers
    )


def counts(split: list[range]) -> list[int]:
    assert [layer for part in split for layer in part] == list(range(split[-1].stop))
    return [len(part) for part in split]


numbers = st.one_of(st.integers(0, 6).map(float), st.sampled_from([0.1, 0.2, 0.3, 0.7, 1e-9]))
