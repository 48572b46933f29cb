"""Weights read once for all ranks that host the same stages: the first of them reads, the others receive.

    first    read q_proj | send | read k_proj | send | ...
    others               | receive            | receive

All ranks take the same tensors of the same files in the same order, as their stages are equal before they are
sharded. Each rank has one tensor at a time in memory, of which it keeps its shard.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import CheckpointError, InputError
from penstock.runtime.health.watch import Watch
from penstock.runtime.ranks import GroupRanks

_WAITING = "the weights that another rank reads"


class FirstReads:
    """The ranks of `group`, which host the same stages, as penstock.models.weights.files.Reads.

    Args:
        limit: the longest wait for one tensor
        device: the device of the group's tensors
    """

    def __init__(
        self, group: dist.ProcessGroup, limit: datetime.timedelta, device: torch.device, watch: Watch
    ) -> None:
        self._group, self._limit, self._device, self._watch = group, limit, device, watch
        self.processes = GroupRanks(group, limit, device, watch, _WAITING)

    def read(self, name: str, read: Callable[[], Tensor], like: Tensor) -> Tensor:
        """Call `read` on the first rank, and return its result on all ranks. Collective.

        Args:
            name: of the tensor, for an error
            like: a tensor of its shape and dtype

        Raises the first rank's error on all.
        """
        failure: Exception | None = None
        value = like.new_empty(0)
        try:
            if self.processes.index == 0:
                value = read().to(self._device).contiguous()
        except Exception as error:
            failure = error

        def fail() -> None:
            if failure is not None and not isinstance(failure, InputError):
                rule = f"it cannot be read ({type(failure).__name__}: {failure})"
                raise CheckpointError(name, rule, "Copy the folder again") from failure
            if failure is not None:
                raise failure

        failed = torch.tensor([int(failure is not None)], device=self._device)
        with self._watch.waiting(_WAITING, None):
            self._send(failed)
            if failed.item():
                self.processes.attempt(f"read {name}", fail)
            if self.processes.index:
                value = torch.empty(like.shape, dtype=like.dtype, device=self._device)
            self._send(value.reshape(-1).view(torch.uint8))  # bytes: gloo does not know every dtype
        return value

    def _send(self, tensor: Tensor) -> None:
        if tensor.numel():
            work = dist.broadcast(tensor, group=self._group, group_src=0, async_op=True)
            assert work is not None
            work.wait(self._limit)
