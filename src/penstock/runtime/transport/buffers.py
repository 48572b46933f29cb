"""Receive buffers: a pool that reuses memory, and staging through host memory.

A received tensor becomes the start of a stage's graph, and autograd keeps it as long as the backward needs
it: nothing else knows when that ends. So a buffer is free when the pool is the only user of its storage.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, UntypedStorage

from penstock.batch.payload import TensorSpec
from penstock.private import storage_use_count
from penstock.runtime.device.copies import Copies
from penstock.runtime.device.stream import Moment

_WASTE = 1.125  # a buffer may be this much larger than needed, so that ragged lengths share buffers
_ALIGNED = 64  # bytes


class Pool:
    """Memory for receives on `device`. Between steps it keeps the buffers of the last step, and no more.

    pinned: whether it is host memory that a GPU can copy asynchronously
    """

    def __init__(self, device: torch.device, pinned: bool = False) -> None:
        self._device, self._pinned = device, pinned
        self._buffers: list[UntypedStorage] = []
        self._used: set[int] = set()  # since the last `trim`, by address of the storage
        self._largest = 0  # bytes, since then

    def take(self, spec: TensorSpec) -> Tensor:
        """A tensor of that shape and dtype whose memory nothing else uses; its values are arbitrary."""
        storage = self._find(spec.nbytes) or self._make(spec.nbytes)
        self._used.add(storage._cdata)
        self._largest = max(self._largest, storage.nbytes())
        self.drop_idle(storage)
        empty = torch.empty(0, dtype=spec.dtype, device=self._device)
        return empty.set_(storage, 0, spec.shape)  # type: ignore[call-overload, no-any-return]

    @property
    def nbytes(self) -> int:
        """Bytes of all its buffers, used or free."""
        return sum(buffer.nbytes() for buffer in self._buffers)

    @property
    def idle_bytes(self) -> int:
        """Bytes of its free buffers."""
        return sum([buffer.nbytes() for buffer in self._buffers if _is_free(buffer)])

    def trim(self) -> None:
        """Free the buffers that were not used since the last call."""
        self._buffers = [b for b in self._buffers if b._cdata in self._used or not _is_free(b)]
        self._used.clear()
        self._largest = 0

    def drop_idle(self, taken: UntypedStorage | None = None) -> None:
        """Keep no more free bytes than the largest buffer taken since the last `trim`: otherwise messages of
        many lengths would leave many buffers that few messages fit into.

        taken: a buffer in use that nothing else refers to yet
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
        memory = torch.empty(size, dtype=torch.uint8, device=self._device, pin_memory=self._pinned)
        self._buffers.append(memory.untyped_storage())
        return self._buffers[-1]


def _is_free(buffer: UntypedStorage) -> bool:
    return bool(storage_use_count(buffer._cdata) == 1)


# ---- Staging: gloo between GPUs moves messages through host memory, so that ranks can share one GPU.
#
# The host memory is pinned, and copies to and from it are queued on streams of their own: the GPU computes
# meanwhile, and neither end waits for the other's kernels.


class Staging:
    """Copies between a device and host buffers of `pool`."""

    def __init__(self, pool: Pool, copies: Copies) -> None:
        self._pool, self._copies = pool, copies
        self._copying: list[tuple[Moment, Tensor]] = []  # host memory that the device still reads

    def down(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Moment]:
        """Copies in host memory, and the moment at which they are complete."""
        hosts = [self._pool.take(TensorSpec.of(tensor)) for tensor in tensors]
        return hosts, self._copies.down([tensor.detach() for tensor in tensors], hosts)

    def up(self, hosts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Copies on the device. The host memory is held until they are complete."""
        copies, moment = self._copies.up(hosts)
        self._copying = [(when, host) for when, host in self._copying if not when.query()]
        self._copying += [(moment, host) for host in hosts]
        return copies

    def settle(self) -> None:
        """Wait until the device reads no host memory."""
        for moment, _ in self._copying:
            moment.synchronize()
        self._copying = []
