"""Blocks: where one rank's messages lie in its segment. The sender takes one, the receiver frees it.

    sender      take -> copy a message into it -> (the entry of messages.py says where it lies)
    receiver    open -> tensors in it, without a copy -> free, once the receiver alone holds its storage

Autograd keeps a received tensor as long as a backward needs it, and nothing else knows when that ends: so
the receiver looks at who still holds the storage, as `penstock.runtime.transport.buffers` does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, UntypedStorage

from penstock.batch.payload import TensorSpec
from penstock.private import storage_use_count
from penstock.runtime.shared_memory.segment import BLOCKS, STATES, Segment

PAGE = 4096
ALIGNED = 64  # bytes
_FREE, _HELD = 0, 1


@dataclass(slots=True, eq=False)
class Block:
    """Its addresses, of which the first `touched` bytes have memory. used: since the last `trim`"""

    number: int
    at: int
    capacity: int
    touched: int = 0
    used: bool = True


class Blocks:
    """The blocks of this rank's own segment. Between steps it keeps what the last step used, and no more."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._by_capacity: defaultdict[int, list[Block]] = defaultdict(list)
        self._end = BLOCKS
        self._count = self._largest = 0
        self.nbytes = 0  # with memory

    def take(self, nbytes: int) -> Block:
        """A block that nothing uses, with room for `nbytes`. Its receiver frees it."""
        capacity = rounded(nbytes)
        self._largest = max(self._largest, nbytes)
        block = self._free_one(capacity) or self._make(capacity)
        if block.touched < nbytes:
            self._drop_idle(block)
            self.nbytes += nbytes - block.touched
            block.touched = nbytes
        block.used = True
        self._segment.words[STATES // 8 + block.number] = _HELD
        return block

    def trim(self) -> None:
        """Return the memory of free blocks that were not used since the last call."""
        for blocks in self._by_capacity.values():
            for block in blocks:
                if not block.used and block.touched and self._is_free(block):
                    self._empty(block)
                block.used = False
        self._largest = 0

    def _free_one(self, capacity: int) -> Block | None:
        """A free block, with memory if there is one. They are freed in about the order of their use."""
        blocks = self._by_capacity[capacity]
        without: Block | None = None
        for index, block in enumerate(blocks):
            if self._is_free(block):
                if block.touched:
                    blocks.append(blocks.pop(index))
                    return block
                without = without or block
        return without

    def _make(self, capacity: int) -> Block:
        if self._end + capacity > self._segment.nbytes:
            raise RuntimeError(f"no room for {capacity} bytes in a shared segment of {self._segment.nbytes}")
        block = Block(self._count, self._end, capacity)
        self._count += 1
        self._end += capacity
        self._by_capacity[capacity].append(block)
        return block

    def _drop_idle(self, taken: Block) -> None:
        """Before memory grows: keep no more idle bytes than the largest message since the last `trim`.

        Where lengths differ from message to message, memory would gather that hardly any message fits.
        """
        idle = [
            block
            for blocks in self._by_capacity.values()
            for block in blocks
            if block.touched and block is not taken and self._is_free(block)
        ]
        left = sum([block.touched for block in idle])
        for block in idle:
            if left <= self._largest:
                return
            left -= block.touched
            self._empty(block)

    def _empty(self, block: Block) -> None:
        self._segment.free(block.at, -(-block.touched // PAGE) * PAGE)
        self.nbytes -= block.touched
        block.touched = 0

    def _is_free(self, block: Block) -> bool:
        return self._segment.words[STATES // 8 + block.number] == _FREE


def rounded(nbytes: int) -> int:
    """The capacity of a block for that many bytes: whole pages, an eighth more at most, to be used again."""
    step = max(PAGE, 1 << max(nbytes.bit_length() - 4, 0))
    return max(-(-nbytes // step), 1) * step


class RingEntry(NamedTuple):
    """Where a message lies: its block, its bytes, and those of the specs in front, if they come with it."""

    number: int
    at: int
    nbytes: int
    header: int
    microbatch: int


class Received:
    """The messages in another rank's segment whose blocks this rank has not freed."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._held: list[tuple[RingEntry, list[UntypedStorage]]] = []

    def tensors(self, entry: RingEntry, specs: Iterable[TensorSpec]) -> list[Tensor]:
        """The tensors of a message, which lie one behind the other, each in a storage of its own."""
        tensors, begin = [], aligned(entry.header)
        for spec in specs:
            tensors.append(self._segment.separate(entry.at + begin, spec.shape, spec.dtype))
            begin += aligned(spec.nbytes)
        assert begin == entry.nbytes, f"a message of {entry.nbytes} bytes where {begin} were expected"
        self._held.append((entry, [tensor.untyped_storage() for tensor in tensors]))
        return tensors

    def take_unused(self) -> list[RingEntry]:
        """The messages that nothing holds any more; to be given to `free`."""
        unused, held = [], []
        for entry, storages in self._held:
            in_use = any(storage_use_count(storage._cdata) > 1 for storage in storages)
            if in_use:
                held.append((entry, storages))
            else:
                unused.append(entry)
        self._held = held
        return unused

    def free(self, entries: Iterable[RingEntry]) -> None:
        """Let the sender use their blocks again."""
        for entry in entries:
            self._segment.words[STATES // 8 + entry.number] = _FREE


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNED) * ALIGNED
