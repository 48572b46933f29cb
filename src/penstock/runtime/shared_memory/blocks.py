"""Blocks: parts of a rank's segment, each for one message. The sender takes one, the receiver frees it.

sender      take -> copy a message into it -> (the entry of messages.py says where it lies)
receiver    tensors in it, without a copy -> free, once nothing else holds their storages
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from penstock.runtime.shared_memory.segment import BLOCKS, STATES, Segment

PAGE = 4096
_FREE, _TAKEN = 0, 1


@dataclass(slots=True, eq=False)
class Block:
    """A range of addresses, of which the first `touched` bytes have memory. used: since the last `trim`"""

    index: int
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
        self.nbytes = 0  # that have memory

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
        self._segment.words[STATES // 8 + block.index] = _TAKEN
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
        """A free block, if possible one with memory. Blocks are freed in about the order of their use."""
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

        Otherwise messages of many lengths would leave many blocks that few messages fit into.
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
        return self._segment.words[STATES // 8 + block.index] == _FREE


def free_block(segment: Segment, index: int) -> None:
    """Let the sender use a block of its segment again."""
    segment.words[STATES // 8 + index] = _FREE


def rounded(nbytes: int) -> int:
    """The capacity of a block for that many bytes: whole pages, and up to an eighth more, for reuse."""
    step = max(PAGE, 1 << max(nbytes.bit_length() - 4, 0))
    return max(-(-nbytes // step), 1) * step
