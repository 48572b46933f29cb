"""Receive buffers, used again as soon as nothing holds their memory any more.

What was received becomes the start of a stage's graph, and autograd keeps it for as long as the backward
needs it: nobody else knows when that ends. So a buffer is free when the pool alone holds its storage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, UntypedStorage

from penstock.batch.payload import TensorSpec

_WASTE = 1.125  # a buffer this much larger than what is asked for will do: ragged lengths share buffers
_ALIGNED = 64  # bytes


class Pool:
    """Memory for receives on `device`. Between steps it keeps what the last step used, and no more.

    pinned: host memory that a GPU copies from and to on its own
    """

    def __init__(self, device: torch.device, pinned: bool = False) -> None:
        self._device, self._pinned = device, pinned
        self._buffers: list[UntypedStorage] = []
        self._used: set[int] = set()  # since the last `trim`, by address of the storage
        self._largest = 0  # bytes, since then

    def take(self, spec: TensorSpec) -> Tensor:
        """A tensor of that shape and dtype whose memory nobody else has; its values are arbitrary."""
        storage = self._find(spec.nbytes) or self._make(spec.nbytes)
        self._used.add(storage._cdata)
        self._largest = max(self._largest, storage.nbytes())
        self.drop_idle(storage)
        empty = torch.empty(0, dtype=spec.dtype, device=self._device)
        return empty.set_(storage, 0, spec.shape)  # type: ignore[call-overload, no-any-return]

    @property
    def nbytes(self) -> int:
        """All that it holds, used or free."""
        return sum(buffer.nbytes() for buffer in self._buffers)

    @property
    def idle_bytes(self) -> int:
        """Of its buffers that nobody else holds."""
        return sum([buffer.nbytes() for buffer in self._buffers if _is_free(buffer)])

    def trim(self) -> None:
        """Let go of what was not needed since the last call."""
        self._buffers = [b for b in self._buffers if b._cdata in self._used or not _is_free(b)]
        self._used.clear()
        self._largest = 0

    def drop_idle(self, taken: UntypedStorage | None = None) -> None:
        """Of what lies idle keep no more than the largest that was taken of late: where lengths differ from
        message to message, buffers would gather that hardly any message fits.

        taken: a buffer that is in use already, though nobody else holds it yet
        """
        idle = [buffer for buffer in self._buffers if buffer is not taken and _is_free(buffer)]
        while idle and sum([buffer.nbytes() for buffer in idle]) > self._largest:
            oldest = idle.pop(0)
            self._buffers = [buffer for buffer in self._buffers if buffer is not oldest]

    def _find(self, nbytes: int) -> UntypedStorage | None:
        """The smallest free buffer that fits."""
        best: UntypedStorage | None = None
        for buffer in self._buffers:
            size = buffer.nbytes()
            if nbytes <= size <= max(nbytes * _WASTE, _ALIGNED) and _is_free(buffer):
                if size - nbytes < _ALIGNED:
                    return buffer
                if best is None or size < best.nbytes():
                    best = buffer
        return best

    def _make(self, nbytes: int) -> UntypedStorage:
        size = max(-(-nbytes // _ALIGNED), 1) * _ALIGNED
        made = torch.empty(size, dtype=torch.uint8, device=self._device, pin_memory=self._pinned)
        self._buffers.append(made.untyped_storage())
        return self._buffers[-1]


def _is_free(buffer: UntypedStorage) -> bool:
    return bool(torch._C._storage_Use_Count(buffer._cdata) == 1)


# ---- gloo between GPUs: messages go by way of host memory, so that several ranks can share one GPU.
#
# The host memory is pinned, and copies to and from it are queued on the GPU's stream like any op: neither
# end waits for the other's kernels before it may go on.


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
