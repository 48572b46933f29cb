"""Copies of shards in another host's memory: which rank keeps which copies, and the messages between them.

    host A   rank 0 ----> rank 2   host B        the n-th rank of a host sends to the n-th of the next
             rank 1 ----> rank 3                 host; if that has fewer, one of them keeps several
             rank 0 <---- rank 2
             rank 1 <---- rank 3

On one host no rank sends anything: the host's memory outlives each of its processes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.pipeline.split_model import SplitModel
from penstock.runtime.transport.groups import new_group

UnderWay = tuple[dist.Work, Tensor]  # a message, and its bytes, which must live until it is complete


def keepers(hosts: Sequence[str]) -> list[int | None]:
    """The rank that keeps the copies of each rank, by the names of their hosts; None on one host."""
    ranks: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append(rank)
    if len(ranks) == 1:
        return [None] * len(hosts)
    names, kept_by = list(ranks), dict[int, int | None]()
    for name, following in zip(names, [*names[1:], names[0]], strict=True):
        takers = ranks[following]
        kept_by |= {rank: takers[index % len(takers)] for index, rank in enumerate(ranks[name])}
    return [kept_by[rank] for rank in range(len(hosts))]


class Neighbours:
    """The ranks that keep each other's copies. Every process of the job makes one. hosts: by rank"""

    def __init__(self, pipe: SplitModel, hosts: Sequence[str], timeout: float) -> None:
        self._ranks = pipe.ranks
        rank, kept_by = self._ranks.index, keepers(hosts)
        self.keeper = kept_by[rank]
        self.wards = [other for other, keeper in enumerate(kept_by) if keeper == rank]
        self._limit = timedelta(seconds=timeout)
        self._group: dist.ProcessGroup | None = None
        if self.keeper is not None:  # on all ranks or on none
            with self.waiting():
                self._group = new_group(range(len(hosts)), self._limit, "in-memory checkpoints")

    def waiting(self) -> AbstractContextManager[None]:
        """Raise an error that names the other rank if a message in the block fails."""
        return self._ranks.waiting("a copy of an in-memory checkpoint")

    def send(self, rank: int, about: Mapping[str, Any], data: Tensor) -> list[UnderWay]:
        """Begin to send a shard and its description, in JSON. The bytes must not change until `finish`."""
        text = torch.frombuffer(bytearray(json.dumps(about).encode()), dtype=torch.uint8)
        sizes = torch.tensor([text.numel(), data.numel()])
        messages = (sizes, text, data)
        return [(_begun(dist.isend(message, rank, self._group)), message) for message in messages]

    def receive(self, rank: int, allocate: Callable[[int], Tensor]) -> dict[str, Any]:
        """Receive a shard into `allocate(bytes)`. Returns its description."""
        sizes = torch.zeros(2, dtype=torch.int64)
        self._receive_into(sizes, rank)
        text = torch.empty(int(sizes[0]), dtype=torch.uint8)
        self._receive_into(text, rank)
        self._receive_into(allocate(int(sizes[1])), rank)
        about: dict[str, Any] = json.loads(text.numpy().tobytes())
        return about

    def finish(self, under_way: Sequence[UnderWay]) -> None:
        """Wait for messages. Raises RuntimeError if a rank is gone or late."""
        for work, _ in under_way:
            work.wait(self._limit)

    def _receive_into(self, tensor: Tensor, rank: int) -> None:
        self.finish([(_begun(dist.irecv(tensor, rank, self._group)), tensor)])

    def close(self) -> None:
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None


def _begun(work: dist.Work | None) -> dist.Work:
    assert work is not None
    return work
