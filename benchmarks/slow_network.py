"""A network slower than the real one, to try schedules on.

It makes `simulate`'s communication real: a message is available latency + bytes / bandwidth after its
producer's op ended, or when it has really arrived if that is later. Messages do not slow each other down.
The sender's clock travels with the tensors, so all ranks must be on one machine, whose processes share it,
and compute on the CPU, where an op has ended when its call returns.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch

from penstock.batch.payload import EdgeSpecs, Payload, TensorSpec
from penstock.runtime.transport.distributed import DistributedTransport
from penstock.runtime.transport.interface import Messages, on_wire
from penstock.schedule.order import Message

_STAMP = TensorSpec((1,), torch.int64)  # nanoseconds; no floating point, which may be narrowed on the wire


@dataclass(frozen=True)
class Network:
    """A slower network. latency: seconds; bandwidth: bytes a second, None: no limit."""

    latency: float = 0.0
    bandwidth: float | None = None

    def delay(self, nbytes: int) -> float:
        """Seconds that a message of that size travels."""
        return self.latency + (nbytes / self.bandwidth if self.bandwidth is not None else 0.0)

    def hold_back(self, sent: int, nbytes: int) -> None:
        """Wait until a message of `nbytes` is available. sent: when, as of time.perf_counter_ns"""
        left = self.delay(nbytes) - (time.perf_counter_ns() - sent) / 1e9
        if left > 0:
            time.sleep(left)


class SlowMessages(Messages):
    """`messages`, each of which takes the time of the network. A tensor more in each has its stamp."""

    def __init__(self, messages: Messages, network: Network, wire: torch.dtype | None) -> None:
        self._messages, self._network, self._wire = messages, network, wire
        self.needless, self.carried_by = messages.needless, messages.carried_by
        for name in ("arrived", "start", "free", "complete", "end_step", "reset", "close"):
            setattr(self, name, getattr(messages, name))

    def post(self, message: Message, specs: EdgeSpecs | None) -> None:
        self._messages.post(message, None if specs is None else _stamped(specs))

    def send(self, message: Message, payload: Payload, with_specs: bool) -> None:
        tensors = *payload.tensors, torch.tensor([time.perf_counter_ns()])
        stamped = payload._replace(tensors=tensors, specs=_stamped(payload.specs))
        self._messages.send(message, stamped, with_specs)

    def receive(self, message: Message) -> Payload | None:
        stamped = self._messages.receive(message)
        assert stamped is not None
        (*tensors, stamp), specs = stamped.tensors, stamped.specs
        specs = replace(specs, tensors=specs.tensors[:-1])
        self._network.hold_back(int(stamp), sum(spec.nbytes for spec in on_wire(specs, self._wire)))
        return stamped._replace(tensors=tuple(tensors), specs=specs)

    @property
    def buffer_bytes(self) -> int:
        return self._messages.buffer_bytes

    @property
    def pending(self) -> int:
        return self._messages.pending


def _stamped(specs: EdgeSpecs) -> EdgeSpecs:
    return replace(specs, tensors=(*specs.tensors, _STAMP))


@contextmanager
def slowed_down(network: Network | None) -> Iterator[None]:
    """Pipelines that are built inside send their messages over `network`; None leaves them as they are."""
    opened = DistributedTransport.open

    def open_slow(
        self: DistributedTransport, schedule: Any, wire: torch.dtype | None, **options: Any
    ) -> None:
        opened(self, schedule, wire, **options)
        if network is not None:
            self.messages = SlowMessages(self.messages, network, wire)

    with patch.object(DistributedTransport, "open", open_slow):
        yield
