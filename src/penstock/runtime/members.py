"""The processes of a group, for what they tell each other beside the steps."""

from __future__ import annotations

import datetime
import json
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import PeerLostError, StalledPeerError

# Of the latest collectives. A thread of gloo lets go of them a moment after it has said that they are over.
# If it were the last to do so it would need Python, which may be ending by then: that aborts the process.
_LATEST: deque[tuple[Tensor, list[Tensor]]] = deque(maxlen=16)


class Members:
    """Of `group`; each wait for the others takes `limit` at most. device: where the group's tensors are"""

    def __init__(self, group: dist.ProcessGroup, limit: datetime.timedelta, device: torch.device) -> None:
        self._group, self._limit, self._device = group, limit, device
        self.index, self.count = dist.get_rank(group), dist.get_world_size(group)

    def gather(self, value: Any) -> list[Any]:
        return gather(value, self._exchange)

    def _exchange(self, mine: Tensor) -> list[Tensor]:
        work, everyone = all_gather(mine.to(self._device), self._group, self.count)
        work.wait(self._limit)
        return everyone


class Everyone(Members):
    """All processes of the job, before there is any mesh, and so no watch that could name who is late."""

    def __init__(self, timeout: float, device: torch.device) -> None:
        group = dist.group.WORLD
        assert group is not None
        where = device if dist.get_backend(group) == "nccl" else torch.device("cpu")
        super().__init__(group, datetime.timedelta(seconds=timeout), where)

    def gather(self, value: Any) -> list[Any]:
        """Raises StalledPeerError, PeerLostError."""
        try:
            return super().gather(value)
        except RuntimeError as cause:
            late = "timed out" in str(cause).lower()
            kind = StalledPeerError if late else PeerLostError
            seconds = self._limit.total_seconds()
            raise kind(
                f"process {self.index} waiting for the handshake of all {self.count}",
                f"some of them did not come within {seconds:.0f} s" if late else "some of them are gone",
                "Let every process of the job build the pipeline, and see what the others failed at",
            ) from cause


def gather(value: Any, exchange: Callable[[Tensor], list[Tensor]]) -> list[Any]:
    """Everyone's `value`, by way of an exchange of float64 vectors of one length."""
    text = json.dumps(value).encode()
    length = torch.tensor([len(text)], dtype=torch.float64)
    longest = int(max(size.item() for size in exchange(length)))
    padded = torch.zeros(longest, dtype=torch.float64)
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    received = exchange(padded)
    return [json.loads(bytes(t.to(torch.uint8).tolist()).rstrip(b"\0")) for t in received]


def all_gather(mine: Tensor, group: dist.ProcessGroup, count: int) -> tuple[dist.Work, list[Tensor]]:
    """Started, of tensors where the group wants them."""
    everyone = list(mine.new_empty((count, *mine.shape)).unbind())
    work = dist.all_gather(everyone, mine, group, async_op=True)
    assert work is not None
    _LATEST.append((mine, everyone))
    return work, everyone
