"""gloo between GPUs: messages go by way of host memory, so that several ranks can share one GPU.

The host memory is pinned, and copies to and from it are queued on the GPU's stream like any op: neither end
waits for the other's kernels before it may go on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from penstock.runtime.parcel import TensorSpec
from penstock.runtime.pool import Pool


class Moment(Protocol):
    """A point in a stream, as torch.cuda.Event."""

    def synchronize(self) -> None: ...
    def query(self) -> bool: ...


class Staging:
    """Between `device` and host buffers of `pool`.

    now: marks the point that the device's stream has come to
    """

    def __init__(self, device: torch.device, pool: Pool, now: Callable[[], Moment] | None = None) -> None:
        self._device, self._pool = device, pool
        self._now = now or partial(_CudaMoment, device)
        self._copying: list[tuple[Moment, Tensor]] = []  # host memory that the device still reads

    def down(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Moment]:
        """Copies in host memory, and the moment from which on they are whole."""
        hosts = []
        for tensor in tensors:
            host = self._pool.take(TensorSpec.of(tensor))
            host.copy_(tensor.detach(), non_blocking=True)
            hosts.append(host)
        return hosts, self._now()

    def up(self, hosts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Copies on the device. The host memory is held until they are made."""
        made = tuple([host.to(self._device, non_blocking=True) for host in hosts])
        moment = self._now()
        self._copying = [(when, host) for when, host in self._copying if not when.query()]
        self._copying += [(moment, host) for host in hosts]
        return made

    def settle(self) -> None:
        """Wait until no host memory is read any more."""
        for moment, _ in self._copying:
            moment.synchronize()
        self._copying = []


class _CudaMoment:
    """What the stream of `device` has come to, for any thread to wait for.

    A thread begins on GPU 0 whatever its process computes on, and would open a context there by waiting.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # spins else
        self._event.record(torch.cuda.current_stream(device))

    def synchronize(self) -> None:
        with torch.cuda.device(self._device):
            self._event.synchronize()

    def query(self) -> bool:
        with torch.cuda.device(self._device):
            return bool(self._event.query())  # type: ignore[no-untyped-call]
