"""Checksums of messages, around any other transport: a bit that flips on the way is noticed.

    send      [hidden, mask]                    --inner-->   [hidden, mask, sums]
    receive   [hidden, mask], or RunError       <--compare-- [hidden, mask, sums]

The inner transport moves a message with one tensor more: an xxh3 checksum of each tensor, of its bytes in the
wire's dtype. What happens to a tensor before it is sent, and after it was compared, is not noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import xxhash
from torch import Tensor

from penstock.batch.payload import EdgeSpecs, Payload, TensorSpec
from penstock.errors import RunError
from penstock.runtime.transport.interface import Messages, narrowed
from penstock.schedule.order import Message


def checksum(data: Tensor) -> int:
    """64 bits, of a CPU tensor's bytes in their order: faster than a sum of them. Other threads run on."""
    return xxhash.xxh3_64(data.contiguous().view(-1).view(torch.uint8).numpy().data).intdigest()


class CheckedMessages(Messages):
    """The messages of `inner`, with a checksum of each tensor. A message without tensors has none.

    Args:
        hosts: the rank of each stage.
        wire: the dtype in which floating-point tensors travel; None leaves them as they are.
        name_of: the name of a rank and its host.
    """

    def __init__(
        self,
        inner: Messages,
        hosts: Sequence[int],
        wire: torch.dtype | None,
        name_of: Callable[[int], str],
    ) -> None:
        self._inner, self._hosts, self._wire, self._name_of = inner, hosts, wire, name_of
        self.needless = inner.needless
        self.carried_by = inner.carried_by and f"{inner.carried_by}, with checksums"

    # ---- receiving

    def post(self, message: Message, specs: EdgeSpecs | None) -> None:
        self._inner.post(message, None if specs is None else _with_sums(specs))

    def arrived(self, message: Message) -> bool:
        return self._inner.arrived(message)

    def receive(self, message: Message) -> Payload | None:
        payload = self._inner.receive(message)
        if payload is None or not payload.tensors:
            return payload
        self.compare(message, payload)
        specs = EdgeSpecs(payload.specs.tensors[:-1], payload.specs.form)
        return Payload(payload.tensors[:-1], specs, payload.only_sent)

    def compare(self, message: Message, payload: Payload) -> None:
        """Raise RunError where a tensor of a payload has another checksum than the one that came with it."""
        *tensors, sums = payload.tensors
        actual = self._sums(tensors)
        if torch.equal(sums, actual):
            return
        at = int((sums != actual).nonzero()[0])
        source, target = (self._name_of(self._hosts[end]) for end in (message.op.stage, message.target))
        tensor = f"tensor {at} ({payload.specs.tensors[at]}) of the result of {message.op}"
        raise RunError(
            f"{tensor}, from {source} to {target}",
            "it does not have the checksum that it was sent with: bits changed on the way",
            "Go on from the last checkpoint; where it happens again, test the memory of both hosts and "
            "the network between them",
        )

    # ---- sending

    def send(self, message: Message, payload: Payload, with_specs: bool) -> None:
        if payload.tensors:
            sums = self._sums(payload.tensors)
            payload = Payload((*payload.tensors, sums), _with_sums(payload.specs), payload.only_sent)
        self._inner.send(message, payload, with_specs)

    def _sums(self, tensors: Sequence[Tensor]) -> Tensor:
        """(tensors,), int64"""
        sums = [checksum(tensor.detach()) for tensor in narrowed(tensors, self._wire)]
        return torch.tensor(sums, dtype=torch.uint64).view(torch.int64)

    def start(self) -> None:
        self._inner.start()

    def free(self, message: Message) -> None:
        self._inner.free(message)

    # ---- state

    def complete(self) -> None:
        self._inner.complete()

    @property
    def buffer_bytes(self) -> int:
        return self._inner.buffer_bytes

    @property
    def pending(self) -> int:
        return self._inner.pending

    def end_step(self) -> None:
        self._inner.end_step()

    def reset(self) -> None:
        self._inner.reset()

    def close(self) -> None:
        self._inner.close()


def _with_sums(specs: EdgeSpecs) -> EdgeSpecs:
    """The specs of a message with its checksums, which carry no gradient."""
    if not specs.tensors:
        return specs
    sums = TensorSpec((len(specs.tensors),), torch.int64, differentiable=False)
    return EdgeSpecs((*specs.tensors, sums), specs.form)
