"""Tokens in memory, in the place of a cache's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.train.data.packing import Numbers
from penstock.train.data.store import Facts, Store
from penstock.train.encoding.chat import Labels
from penstock.train.encoding.tokenizer import Ids


def in_memory(tokens: Ids, lengths: Sequence[int] | Numbers, labels: Labels | None = None) -> Store:
    """A store of arrays."""
    facts = Facts(len(lengths), len(tokens), len(tokens), 0, int(tokens.max(initial=0)), "", 0, "")
    return Store(tokens, labels, np.asarray(lengths, dtype=np.int64), facts)
