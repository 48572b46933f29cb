"""Messages all of a moment together: what penstock.schedule.order has proven to end.

All lanes are in one group. There NCCL moves a batch in one kernel, and batches one after the other; on gloo
each tensor goes by itself, and waiting for one waits for all of its batch and of those before, so that what
runs is what was proven.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from penstock.runtime.transport.point_to_point import FOREVER, P2PGroup, Work

# some builds of torch have it: one tensor at most to and from each of the two neighbours in a ring
RingExchange = Callable[..., None]


class Transfer(NamedTuple):
    """One tensor to send to, or to receive from, rank `peer` of the group."""

    tensor: Tensor
    sends: bool
    peer: int
    tag: int


class Batches:
    """ring: torch.distributed.ring_exchange where there is one"""

    def __init__(self, group: dist.ProcessGroup, ring: RingExchange | None = None) -> None:
        self._group, self._ring = group, ring
        self._given: list[Transfer] = []
        self._next = Batch(None)

    def send(self, lane: P2PGroup, tensors: Sequence[Tensor]) -> list[Work]:
        self._given += [Transfer(tensor, True, lane.target, lane.tag) for tensor in tensors]
        return [self._next]

    def receive(self, lane: P2PGroup, buffers: Sequence[Tensor]) -> list[Work]:
        self._given += [Transfer(buffer, False, lane.source, lane.tag) for buffer in buffers]
        return [self._next]

    def start(self, in_line: bool) -> None:
        given, self._given = self._given, []
        batch, self._next = self._next, Batch(self._next)
        batch.begin(self._start(given, in_line) if given else [])  # a message may hold no tensor

    def _start(self, given: Sequence[Transfer], in_line: bool) -> list[Work]:
        if self._ring is not None and in_line:  # nothing that the stream does next begins before it is over
            sides = neighbours(given, self._group.rank(), self._group.size())
            if sides is not None:
                self._ring(**sides, group=self._group)
                return []
        ops = [
            dist.P2POp(
                dist.isend if sends else dist.irecv, tensor, group=self._group, tag=tag, group_peer=peer
            )
            for tensor, sends, peer, tag in given
        ]
        return list(dist.batch_isend_irecv(ops))


class Batch:
    """What began together, to be waited for as one. `before`: the batch that must be over first."""

    def __init__(self, before: Batch | None) -> None:
        self._before = before
        self._works: list[Work] | None = None

    def begin(self, works: list[Work]) -> None:
        self._works = works

    def wait(self, timeout: timedelta = FOREVER) -> bool:
        chain: list[Batch] = []
        batch: Batch | None = self
        while batch is not None:
            chain.append(batch)
            batch = batch._before
        while chain:
            chain.pop()._finish(timeout)
        return True

    def _finish(self, timeout: timedelta) -> None:
        assert self._works is not None, "it has not begun"
        while self._works:  # gloo bears no second wait
            self._works[0].wait(timeout)
            del self._works[0]
        self._before = None

    def is_completed(self) -> bool:
        """Those before are over then, too: NCCL runs them in order, and `wait` waits for them in order."""
        return self._works is not None and all(work.is_completed() for work in self._works)


def neighbours(given: Sequence[Transfer], rank: int, size: int) -> dict[str, Tensor | None] | None:
    """The arguments of a ring exchange, None where it does not fit.

    Of two ranks each is both neighbours of the other, and is taken for the one before.
    """
    sides = {(rank + 1) % size: "next", (rank - 1) % size: "prev"}
    found: dict[str, Tensor | None] = {
        f"tensor_{way}_{side}": None for way in ("send", "recv") for side in ("prev", "next")
    }
    for tensor, sends, peer, _ in given:
        side = f"tensor_{'send' if sends else 'recv'}_{sides.get(peer)}"
        if side not in found or found[side] is not None:
            return None
        found[side] = tensor
    return found
