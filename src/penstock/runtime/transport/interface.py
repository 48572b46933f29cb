"""How results move between ranks: what the executor needs of it, and the way within one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from penstock.batch.payload import EdgeSpecs, Payload, TensorSpec
from penstock.runtime.health.progress import Progress
from penstock.runtime.plan import Action, Exchange, Free, Message, Post
from penstock.schedule import Op


class Transport(Protocol):
    """Moves messages over channels, first in first out, and values between all ranks of the pipeline.

    overlap: whether pairs of ops that the schedule marks run side by side
    needless: the actions that have no effect here
    closers: what `close` calls besides
    """

    overlap: bool
    needless: frozenset[type[Action]]
    closers: list[Callable[[], None]]

    def broke_off(self, op: Op | str, cause: RuntimeError) -> Exception:
        """The error to raise where `cause` ended `op`: a typed one where it is another rank's doing."""

    def post(self, message: Message, specs: EdgeSpecs | None) -> None:
        """Make room for a message that will come; None where it tells itself what it is."""

    def arrived(self, message: Message) -> bool:
        """Whether `receive` would bring it, or wait for it."""

    def receive(self, message: Message) -> Payload | None:
        """What the message brings; None means that other ranks of this process must run first."""

    def send(self, message: Message, payload: Payload, told: bool) -> None:
        """Start sending; never waits for the receiver. What arrives is no part of the sender's graph.

        told: whether to tell the receiver what it is
        """

    def start(self, in_line: bool) -> None:
        """Begin what was posted and given to be sent since the last call, where it goes together.

        in_line: whether this may wait until it is over
        """

    def free(self, message: Message) -> None:
        """Be sure that a message is gone whose arrival the plan has proven."""

    @property
    def buffer_bytes(self) -> int:
        """Bytes of posted receives, of what is being sent, and of buffers that lie idle."""

    def settle(self) -> None:
        """Wait for `agree` to be done; later than this it is done before the first message."""

    def follow(self, progress: Callable[[], Progress | None]) -> None:
        """From now on let the other ranks know now and then how far this one is."""

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

    def end_step(self) -> None:
        """Let go of what only a step like the last one would need."""

    def reset(self) -> None:
        """Forget a step that failed half-way."""

    def tell_failure(self, reason: str) -> None:
        """Leave word for the other ranks why this one fails."""

    def close(self) -> None:
        """Let go of threads and process groups."""


class LocalTransport:
    """All ranks in one process: a message is handed over as it is, and takes no buffer."""

    overlap = False
    needless: frozenset[type[Action]] = frozenset({Post, Exchange, Free})

    def __init__(self, wire: torch.dtype | None = None) -> None:
        self._wire = wire
        self._mail: dict[Message, Payload] = {}
        self.closers: list[Callable[[], None]] = []

    def broke_off(self, op: Op | str, cause: RuntimeError) -> Exception:
        return cause  # there is no other process

    def post(self, message: Message, specs: EdgeSpecs | None) -> None:
        """Nothing to do: no buffer is needed."""

    def arrived(self, message: Message) -> bool:
        return message in self._mail

    def receive(self, message: Message) -> Payload | None:
        return self._mail.pop(message, None)

    def send(self, message: Message, payload: Payload, told: bool) -> None:
        tensors = payload.tensors
        if self._wire is not None:
            tensors = restored(narrowed(tensors, self._wire), payload.specs)
        self._mail[message] = Payload(of_their_own(tensors, payload.specs), payload.specs)

    def start(self, in_line: bool) -> None:
        """Nothing to do: what was sent is there."""

    def free(self, message: Message) -> None:
        """Nothing to do: the receiver took the tensors over."""

    @property
    def buffer_bytes(self) -> int:
        return 0  # what is on its way is the sender's result itself

    def follow(self, progress: Callable[[], Progress | None]) -> None:
        """Nothing to do: no other process waits."""

    def agree(self, fingerprint: int, description: str) -> None:
        """Nothing to do: there is one batch."""

    def settle(self) -> None:
        """Nothing to do, likewise."""

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

    def end_step(self) -> None:
        """Nothing is kept."""

    def reset(self) -> None:
        self._mail.clear()

    def tell_failure(self, reason: str) -> None:
        """Nothing to do: no other process waits."""

    def close(self) -> None:
        while self.closers:
            self.closers.pop()()


def on_wire(specs: EdgeSpecs, wire: torch.dtype | None) -> Sequence[TensorSpec]:
    """The tensors as they travel: where `wire` is a dtype, all that are of floating point in that one."""
    if wire is None:
        return specs.tensors
    return [spec._replace(dtype=wire) if spec.dtype.is_floating_point else spec for spec in specs.tensors]


def narrowed(tensors: Sequence[Tensor], wire: torch.dtype | None) -> Sequence[Tensor]:
    """As `on_wire` says."""
    if wire is None:
        return tensors
    return [tensor.detach().to(wire) if tensor.is_floating_point() else tensor for tensor in tensors]


def restored(tensors: Sequence[Tensor], specs: EdgeSpecs) -> tuple[Tensor, ...]:
    """In the dtypes that the stages work in."""
    return tuple([t.to(spec.dtype) for t, spec in zip(tensors, specs.tensors, strict=True)])


def of_their_own(tensors: Sequence[Tensor], specs: EdgeSpecs) -> tuple[Tensor, ...]:
    """For a stage of the same process, as if they had come from another: no part of the sender's graph.

    What has no gradient may be changed in place, and be an entry of the batch or what another stage still
    holds: it is copied. Autograd refuses the same for the others.
    """
    pairs = zip(tensors, specs.carrying, strict=True)
    return tuple([t.detach() if carries else t.detach().clone() for t, carries in pairs])


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
