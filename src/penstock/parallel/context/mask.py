"""The attention mask of a full sequence, on a rank with a part of the sequence."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    and_masks,
    padding_mask_function,
)

from penstock.errors import ModelError
from penstock.parallel.context.sequence import FullSequence, pieces

_ALL = (slice(None), slice(0, None))


class Mask:
    """Which token may attend to which, in one kind of layers; built piece by piece, or as one tensor.

    Args:
        rule: function of (row, head, query, key), integers of any shapes that broadcast, as transformers'
            mask functions are; queries and keys are numbered over the full sequence
        window: number of tokens that a query attends to at most, itself included; None for all
        base: name of the attention function that the model uses otherwise
    """

    def __init__(
        self, rule: Callable[..., Any], full: FullSequence, window: int | None, base: str, dtype: torch.dtype
    ) -> None:
        if full.documents is not None:
            rule = _within_documents(rule, full.positions, full.documents)
        self.full, self._rule, self._window, self._base, self._dtype = full, rule, window, base, dtype

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _untouchable(f"asks for the {name!r} of")

    def __getitem__(self, index: Any) -> Mask:
        parts = index if isinstance(index, tuple) else (index,)
        if all(isinstance(part, slice) and part in _ALL for part in parts):
            return self  # a slice that takes all, as where all logits are kept
        raise _untouchable("takes a part of")

    def _calculate(self, *_: Any) -> Any:
        raise _untouchable("calculates with")

    __add__ = __radd__ = __mul__ = __rmul__ = __and__ = __or__ = __invert__ = __bool__ = _calculate

    def reaches(self, queries: int, keys: int) -> bool:
        """Whether a piece of queries may attend to anything of a piece of keys."""
        nearest = (queries - keys - 1) * self.full.piece + 1
        return keys <= queries and (self._window is None or nearest < self._window)

    def between(self, queries: int, keys: int) -> Tensor | None:
        """The mask between two pieces: bool (rows or 1, 1, 1, piece, piece), query by key; None: all true."""
        plain = self.full.mask is None and self.full.documents is None and self._window is None
        return None if plain and keys < queries else self._allowed(queries, keys)[:, :, None]

    def _allowed(self, queries: int, keys: int) -> Tensor:
        size, device, rows = self.full.piece, self.full.positions.device, len(self.full.positions)
        rule = self._rule
        if self.full.mask is not None:
            rule = and_masks(rule, padding_mask_function(self.full.mask))
        at = torch.arange(size, device=device)
        row = torch.arange(rows, device=device)[:, None, None, None]
        query, key = (at + queries * size)[None, None, :, None], (at + keys * size)[None, None, None, :]
        allowed: Tensor = rule(row, row.new_zeros(1, 1, 1, 1), query, key)
        return allowed.expand(-1, 1, size, size)

    @cached_property
    def without_keys(self) -> Tensor | None:
        """Local queries without any key, bool (rows, part): those before a row's first valid token."""
        if self.full.mask is None:
            return None
        keyless = []
        for queries in pieces(self.full.index, self.full.count):
            seen = [self._allowed(queries, keys).any(-1)[:, 0] for keys in range(queries + 1)]
            keyless.append(~torch.stack(seen).any(0))
        lonely = torch.cat(keyless, dim=1)
        return lonely if bool(lonely.any()) else None

    @cached_property
    def tensor(self) -> Tensor | None:
        """The mask of the full sequence as the model's attention function takes it; made once."""
        full, length = self.full, self.full.length
        made: Tensor | None = ALL_MASK_ATTENTION_FUNCTIONS[self._base](
            batch_size=len(full.positions), q_length=length, kv_length=length,
            mask_function=self._rule,
            attention_mask=None if full.mask is None else full.mask[:, :length],
            local_size=self._window, allow_is_causal_skip=full.documents is None,
            dtype=self._dtype, device=full.positions.device,
        )  # fmt: skip
        return made


def _within_documents(rule: Callable[..., Any], positions: Tensor, documents: Tensor) -> Callable[..., Any]:
    """Apply `rule` to positions within documents, and mask other documents. Both tensors: (rows, tokens)"""

    def within(row: Any, head: Any, query: Any, key: Any) -> Any:
        same = documents[row, query] == documents[row, key]
        return same & rule(row, head, positions[row, query], positions[row, key])

    return within


def _untouchable(does: str) -> ModelError:
    return ModelError(
        f"a model that {does} its attention mask by itself",
        "under context parallelism no rank has a mask of the full sequence",
        "Set cp to 1 for this model",
    )
