"""How results move between ranks: what the executor needs of it, and the way within one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from penstock.runtime.lower import Message
from penstock.runtime.shapes import EdgeSpecs


class Transport(Protocol):
    """Moves messages over channels, first in first out, and values between all ranks of the pipeline."""

    def post(self, message: Message, specs: EdgeSpecs) -> None:
        """Make room for a message that will come."""

    def receive(self, message: Message) -> tuple[Tensor, ...] | None:
        """The message's tensors; None means that other ranks of this process must run first."""

    def send(self, message: Message, tensors: tuple[Tensor, ...]) -> None:
        """Start sending; never waits for the receiver. What arrives is no part of the sender's graph."""

    def free(self, message: Message) -> None:
        """Let go of tensors whose arrival the plan has proven."""

    def agree(self, fingerprint: int, description: str) -> None:
        """Make sure, before the first message of a step, that all ranks work on the same step."""

    def exchange(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """Give one float64 vector for each rank of this process; get every rank's, in order, everywhere."""

    def share(self, ranks: tuple[int, ...]) -> None:
        """Make ready for sums over these ranks; called on every rank before the first step."""

    def sum_shared(self, ranks: tuple[int, ...], weights: Sequence[Sequence[Tensor]]) -> None:
        """Replace a weight's tensors, this process's copies, each by the sum of those on all of `ranks`."""

    @property
    def pending(self) -> int:
        """Messages posted, on the way or not yet freed; 0 after every step."""

    def reset(self) -> None:
        """Forget a step that failed half-way."""

    def tell_failure(self, reason: str) -> None:
        """Leave word for the other ranks why this one fails."""

    def close(self) -> None:
        """Let go of threads and process groups."""


class LocalTransport:
    """All ranks in one process: a message is handed over as it is."""

    def __init__(self) -> None:
        self._mail: dict[Message, tuple[Tensor, ...]] = {}

    def post(self, message: Message, specs: EdgeSpecs) -> None:
        """Nothing to do: no buffer is needed."""

    def receive(self, message: Message) -> tuple[Tensor, ...] | None:
        return self._mail.pop(message, None)

    def send(self, message: Message, tensors: tuple[Tensor, ...]) -> None:
        self._mail[message] = tuple([tensor.detach() for tensor in tensors])

    def free(self, message: Message) -> None:
        """Nothing to do: the receiver took the tensors over."""

    def agree(self, fingerprint: int, description: str) -> None:
        """Nothing to do: there is one batch."""

    def exchange(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        return list(vectors)

    def share(self, ranks: tuple[int, ...]) -> None:
        """Nothing to do: every copy is here."""

    def sum_shared(self, ranks: tuple[int, ...], weights: Sequence[Sequence[Tensor]]) -> None:
        for copies in weights:
            add_up(copies)
            spread(copies)

    @property
    def pending(self) -> int:
        return len(self._mail)

    def reset(self) -> None:
        self._mail.clear()

    def tell_failure(self, reason: str) -> None:
        """Nothing to do: no other process waits."""

    def close(self) -> None:
        """Nothing is held."""


@torch.no_grad()
def add_up(copies: Sequence[Tensor]) -> None:
    """Into the first one."""
    for other in copies[1:]:
        copies[0].add_(other)


@torch.no_grad()
def spread(copies: Sequence[Tensor]) -> None:
    """The first one's values to the others."""
    for other in copies[1:]:
        other.copy_(copies[0])
