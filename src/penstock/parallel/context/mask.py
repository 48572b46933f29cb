"""Which token may look at which, told for a whole sequence of which a rank has a part only."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    and_masks,
    packed_sequence_compatibility_function,
    padding_mask_function,
)

from penstock.errors import ModelError
from penstock.parallel.context.sequence import Whole, pieces

_ALL = (slice(None), slice(0, None))


class Mask:
    """Which token may look at which, in one kind of layers.

    rule: a function of (row, head, query, key), whole numbers of any shapes that broadcast, as transformers'
        mask functions are; queries and keys are counted over the whole sequence
    reach: tokens that a query looks back at most, itself included; None for all of them
    base: the attention function that the model would use by itself
    """

    def __init__(
        self, rule: Callable[..., Any], whole: Whole, reach: int | None, base: str, dtype: torch.dtype
    ) -> None:
        if whole.documents is not None:
            rule = packed_sequence_compatibility_function(rule, whole.positions, whole.documents)
        self.whole, self.base, self._reach, self._dtype = whole, base, reach, dtype
        self._rule = rule

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _untouchable(f"asks for the {name!r} of")

    def __getitem__(self, index: Any) -> Mask:
        if all(isinstance(one, slice) and one in _ALL for one in index):
            return self  # all of it, as where all logits are kept
        raise _untouchable("takes a part of")

    def _calculate(self, *_: Any) -> Any:
        raise _untouchable("calculates with")

    __add__ = __radd__ = __mul__ = __rmul__ = __and__ = __or__ = __invert__ = __bool__ = _calculate

    def reaches(self, queries: int, keys: int) -> bool:
        """Whether a piece of queries may see anything of a piece of keys."""
        nearest = (queries - keys - 1) * self.whole.piece + 1
        return keys <= queries and (self._reach is None or nearest < self._reach)

    def between(self, queries: int, keys: int) -> Tensor | None:
        """Of two pieces: bool (rows or 1, 1, 1, piece, piece), by query and key; None: all is allowed."""
        whole = self.whole
        plain = whole.mask is None and whole.documents is None and self._reach is None
        return None if plain and keys < queries else self._allowed(queries, keys)[:, :, None]

    def _allowed(self, queries: int, keys: int) -> Tensor:
        size, device = self.whole.piece, self.whole.positions.device
        rule, rows = self._rule, len(self.whole.positions)
        if self.whole.mask is not None:
            rule = and_masks(rule, padding_mask_function(self.whole.mask))
        at = torch.arange(size, device=device)
        row = torch.arange(rows, device=device)[:, None, None, None]
        query, key = (at + queries * size)[None, None, :, None], (at + keys * size)[None, None, None, :]
        found: Tensor = rule(row, row.new_zeros(1, 1, 1, 1), query, key)
        return found.expand(-1, 1, size, size)

    @cached_property
    def alone(self) -> Tensor | None:
        """Own queries that no key is left for, bool (rows, part): those before a row's first valid token."""
        if self.whole.mask is None:
            return None
        own = []
        for queries in pieces(self.whole.index, self.whole.count):
            seen = [self._allowed(queries, keys).any(-1)[:, 0] for keys in range(queries + 1)]
            own.append(~torch.stack(seen).any(0))
        alone = torch.cat(own, dim=1)
        return alone if bool(alone.any()) else None

    @cached_property
    def _full(self) -> Tensor | None:
        whole, length = self.whole, self.whole.length
        made: Tensor | None = ALL_MASK_ATTENTION_FUNCTIONS[self.base](
            batch_size=len(whole.positions), q_length=length, kv_length=length,
            mask_function=self._rule,
            attention_mask=None if whole.mask is None else whole.mask[:, :length],
            local_size=self._reach, allow_is_causal_skip=whole.documents is None,
            dtype=self._dtype, device=whole.positions.device,
        )  # fmt: skip
        return made

    def full(self) -> Tensor | None:
        """The mask of the whole sequence as the model's own attention function takes it; made once."""
        return self._full


def _untouchable(does: str) -> ModelError:
    return ModelError(
        f"a model that {does} its attention mask by itself",
        "under context parallelism no rank has a mask of the whole sequence",
        "Set cp to 1 for this model",
    )
