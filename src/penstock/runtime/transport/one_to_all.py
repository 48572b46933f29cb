"""Small values of one process for all others, which it sends without waiting for them.

    process 2   send(tokens)    starts a send to 0 and to 1, and goes on
    process 0   receive(...)    waits for the next value, in the order of the sends

Messages between stages go forward and back along the pipeline. These go from one rank straight to all, on the
host and in a process group of their own, so that they overtake nothing that the channels carry.
"""

from __future__ import annotations

import datetime
from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.runtime.health.watch import Watch


class OneToAll:
    """Values of one process for all; here that process is alone, and nothing is sent."""

    def send(self, value: Tensor) -> None:
        """Start to send a vector of int64 on the host. Called by the source."""

    def receive(self, length: int) -> Tensor:
        """The next vector, of this length. Waits for it. Called by the others.

        Raises StalledPeerError or PeerLostError where the source is late or gone.
        """
        raise AssertionError("the source is the only process")

    def finish(self) -> None:
        """Wait until everything that was sent has left."""


class GroupOneToAll(OneToAll):
    """The values of process `source` of a gloo group.

    Args:
        limit: the longest wait
        watch: makes the typed error for a process that is late or gone
    """

    def __init__(
        self, group: dist.ProcessGroup, source: int, limit: datetime.timedelta, watch: Watch
    ) -> None:
        self._group, self._source, self._limit, self._watch = group, source, limit, watch
        self._others = [rank for rank in range(group.size()) if rank != source]
        self._sent: deque[tuple[int, dist.Work, Tensor]] = deque()  # kept until they have left

    def send(self, value: Tensor) -> None:
        for rank in self._others:
            with self._watch.waiting(_WHAT, rank):
                self._sent.append((rank, self._group.send([value], rank, _TAG), value))
        while len(self._sent) > _MOST:
            self._finish_first()

    def receive(self, length: int) -> Tensor:
        value = torch.empty(length, dtype=torch.int64)
        with self._watch.waiting(_WHAT, self._source):
            self._group.recv([value], self._source, _TAG).wait(self._limit)
        return value

    def finish(self) -> None:
        while self._sent:
            self._finish_first()

    def _finish_first(self) -> None:
        rank, work, _ = self._sent.popleft()
        with self._watch.waiting(_WHAT, rank):
            work.wait(self._limit)


_WHAT = "the next tokens"
_TAG = 0
_MOST = 4096  # sends under way
