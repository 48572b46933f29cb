"""Receive buffers, used again as soon as nothing holds their memory any more.

What was received becomes the start of a stage's graph, and autograd keeps it for as long as the backward
needs it: nobody else knows when that ends. So a buffer is free when the pool alone holds its storage.
"""

from __future__ import annotations

import torch
from torch import Tensor, UntypedStorage

from penstock.runtime.parcel import TensorSpec

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
