"""The interface of a transport between the ranks of a pipeline, and the transport within one process."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from penstock.batch.payload import EdgeSpecs, Payload, TensorSpec
from penstock.runtime.plan import Action, Exchange, Free, Post
from penstock.runtime.ranks import Ranks
from penstock.runtime.recorder import Progress
from penstock.schedule import Op
from penstock.schedule.order import Message


class Messages:
    """Moves messages over channels, first in first out.

    needless: the types of a plan's actions that have no effect here
    carried_by: the carrier of messages between processes, for people; empty within one process
    """

    needless: frozenset[type[Action]] = frozenset()
    carried_by: str = ""

    def post(self, message: Message, specs: EdgeSpecs | None) -> None:
        """Post a receive. specs: None where the message carries its own"""

    def arrived(self, message: Message) -> bool:
        """Whether `receive` will return the message, perhaps after a wait."""
        raise NotImplementedError

    def receive(self, message: Message) -> Payload | None:
        """The message's payload. None means that other ranks of this process must run first."""
        raise NotImplementedError

    def send(self, message: Message, payload: Payload, with_specs: bool) -> None:
        """Start sending, without waiting for the receiver. It gets tensors outside of the sender's graph.

        with_specs: whether to send the payload's specs first, for a receiver that does not know them
        """
        raise NotImplementedError

    def start(self) -> None:
        """Start what was posted and sent since the last call, where messages go in batches."""

    def free(self, message: Message) -> None:
        """Make sure that a sent message has left. The plan has proven its arrival."""

    def complete(self) -> None:
        """After the last action of a step, make sure that all its messages have arrived and left."""

    @property
    def buffer_bytes(self) -> int:
        """Bytes of posted receives, of messages being sent, and of idle buffers."""
        return 0

    @property
    def pending(self) -> int:
        """Messages posted, on their way or not yet freed; 0 after every step."""
        raise NotImplementedError

    def end_step(self) -> None:
        """Free memory that only a step like the last one would need."""

    def reset(self) -> None:
        """Forget a failed step, where another one may follow."""

    def close(self) -> None:
        """End threads."""


class LocalMessages(Messages):
    """Messages between ranks of one process: handed over without a buffer.

    wire: the dtype that floating-point tensors are rounded to; None leaves them as they are
    """

    needless: frozenset[type[Action]] = frozenset({Post, Exchange, Free})

    def __init__(self, wire: torch.dtype | None = None) -> None:
        self._wire = wire
        self._mail: dict[Message, Payload] = {}

    def arrived(self, message: Message) -> bool:
        return message in self._mail

    def receive(self, message: Message) -> Payload | None:
        return self._mail.pop(message, None)

    def send(self, message: Message, payload: Payload, with_specs: bool) -> None:
        tensors = payload.tensors
        if self._wire is not None:
            tensors = restored(narrowed(tensors, self._wire), payload.specs)
        self._mail[message] = Payload(detached(tensors, payload.specs), payload.specs)

    @property
    def pending(self) -> int:
        return len(self._mail)

    def reset(self) -> None:
        self._mail.clear()


class Transport:
    """How the ranks of a pipeline communicate: their messages, and collectives over all of them.

    Here one process has all ranks; `DistributedTransport` connects several processes.

    Attributes:
        messages: of the current schedule.
        closers: called by `close`.
        ranks: the processes that the ranks live in.
    """

    messages: Messages

    def __init__(self) -> None:
        self.closers: list[Callable[[], None]] = []
        self.ranks = Ranks()

    def all_gather(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """Give one vector for each rank of this process; get every rank's, in order. Collective."""
        return list(vectors) if self.ranks.count == 1 else self.ranks.all_gather(vectors[0])

    def share(self, ranks: tuple[int, ...]) -> None:
        """Prepare for sums over these ranks, before the first step. Collective over all ranks."""

    def sum_shared(self, ranks: tuple[int, ...], weights: Sequence[Sequence[Tensor]]) -> None:
        """Replace each weight's tensors, one per copy in this process, by the sum over copies on `ranks`."""
        with torch.no_grad():
            for copies in weights:
                for other in copies[1:]:
                    copies[0].add_(other)
            self._sum_first([copies[0] for copies in weights], ranks)
            for copies in weights:
                for other in copies[1:]:
                    other.copy_(copies[0])

    def _sum_first(self, tensors: Sequence[Tensor], ranks: tuple[int, ...]) -> None:
        """Sum the first copy of each weight over the ranks of other processes."""

    def follow(self, progress: Callable[[], Progress | None]) -> None:
        """From now on, publish this rank's progress to the other ranks."""

    def broke_off(self, doing: Op | str, cause: RuntimeError) -> Exception:
        """The error to raise after `cause` ended an op: a typed one if another rank caused it."""
        return cause

    def name_of(self, rank: int) -> str:
        """A rank and its host, for messages."""
        return f"rank {rank} on {socket.gethostname()}"

    def reset(self) -> None:
        """Forget a failed step."""
        self.messages.reset()

    def close(self) -> None:
        """End threads and process groups."""
        while self.closers:
            self.closers.pop()()


class LocalTransport(Transport):
    """All ranks in one process. wire: as in `LocalMessages`"""

    def __init__(self, wire: torch.dtype | None = None) -> None:
        super().__init__()
        self.messages = LocalMessages(wire)


def on_wire(specs: EdgeSpecs, wire: torch.dtype | None) -> Sequence[TensorSpec]:
    """The specs of the tensors as they are sent: floating-point ones in dtype `wire`, unless it is None."""
    if wire is None:
        return specs.tensors
    return [replace(spec, dtype=wire) if spec.dtype.is_floating_point else spec for spec in specs.tensors]


def narrowed(tensors: Sequence[Tensor], wire: torch.dtype | None) -> Sequence[Tensor]:
    """The tensors in the dtypes of `on_wire`."""
    if wire is None:
        return tensors
    return [tensor.detach().to(wire) if tensor.is_floating_point() else tensor for tensor in tensors]


def restored(tensors: Sequence[Tensor], specs: EdgeSpecs) -> tuple[Tensor, ...]:
    """The tensors back in the stages' dtypes."""
    return tuple([t.to(spec.dtype) for t, spec in zip(tensors, specs.tensors, strict=True)])


def detached(tensors: Sequence[Tensor], specs: EdgeSpecs) -> tuple[Tensor, ...]:
    """The tensors for a stage of the same process, as if they had come from another one.

    A tensor without a gradient is copied: a stage may modify it in place, and the batch or another stage may
    use it too. For tensors with a gradient, autograd raises an error on such a modification.
    """
    pairs = zip(tensors, specs.carrying, strict=True)
    return tuple([t.detach() if carries else t.detach().clone() for t, carries in pairs])
