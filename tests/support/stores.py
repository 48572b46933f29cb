"""Stores of tokens that no file holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.train.data.store import Store, StoreFacts

Array = npt.NDArray[Any]


def in_memory(
    tokens: Array,
    lengths: Sequence[int] | Array,
    labels: Array | None = None,
    row_labels: npt.NDArray[np.float64] | None = None,
) -> Store:
    """A store of documents of these lengths, whose tokens lie end to end."""
    facts = StoreFacts(len(lengths), len(tokens), len(tokens), 0, int(tokens.max(initial=0)), "", "")
    return Store(tokens, labels, np.asarray(lengths, dtype=np.int64), facts, row_labels=row_labels)
