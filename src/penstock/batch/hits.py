"""Token accuracy: the share of the labels than which no other token of the vocabulary is likelier.

A loss shows two numbers of each token: the logit of its label, and the greatest one. So whole logits, blocks
of them and shards over tp count the same tokens.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

_EVEN = 0.5  # between the labels 0 and 1


class Hits(Protocol):
    """Gets a loss's logits. wanted: whether it reads the greatest ones"""

    wanted: bool

    def add(self, at_label: Tensor, greatest: Tensor, labels: Tensor, ignored: int) -> None:
        """Add the tokens of a microbatch: the logit of each label, the greatest one, the labels."""

    def add_whole(self, logits: Tensor, labels: Tensor, ignored: int) -> None:
        """The same from logits (*labels.shape, vocabulary), where no loss has reduced them."""

    def add_signs(self, logits: Tensor, labels: Tensor) -> None:
        """Add labels of which each is 0 or 1 and has a logit of its own, of the same shape."""

    def miss(self) -> None:
        """A microbatch's logits were not seen."""

    def reset(self) -> None:
        """Forget all microbatches so far."""

    def take(self) -> float:
        """The number of hits since the last `reset`, and reset; NaN if a microbatch was missed."""


class TokenHits:
    """Counts the labels that have the greatest logit, over microbatches. Only `take` waits for a GPU."""

    wanted = True

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._count: Tensor | None = None
        self._missed = False

    def add(self, at_label: Tensor, greatest: Tensor, labels: Tensor, ignored: int) -> None:
        with torch.no_grad():
            count = ((at_label >= greatest) & (labels != ignored)).sum()
            self._count = count if self._count is None else self._count + count

    def add_whole(self, logits: Tensor, labels: Tensor, ignored: int) -> None:
        with torch.no_grad():
            column = labels.clamp(min=0)[..., None]
            self.add(logits.gather(-1, column)[..., 0], logits.amax(-1), labels, ignored)

    def add_signs(self, logits: Tensor, labels: Tensor) -> None:
        with torch.no_grad():
            self.add(torch.where(labels > _EVEN, logits, -logits), torch.zeros_like(logits), labels, -1)

    def miss(self) -> None:
        self._missed = True

    def take(self) -> float:
        count = torch.nan if self._missed else 0.0 if self._count is None else float(self._count)
        self.reset()
        return count


class NoHits:
    """Counts nothing."""

    wanted = False

    def add(self, at_label: Tensor, greatest: Tensor, labels: Tensor, ignored: int) -> None: ...

    def add_whole(self, logits: Tensor, labels: Tensor, ignored: int) -> None: ...

    def add_signs(self, logits: Tensor, labels: Tensor) -> None: ...

    def miss(self) -> None: ...

    def reset(self) -> None: ...

    def take(self) -> float:
        return torch.nan
