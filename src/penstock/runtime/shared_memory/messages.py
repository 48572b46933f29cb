"""Messages between ranks of one host: the sender copies a message, and the receiver computes on that copy.

    send     take a block, copy the tensors into it, write an entry, announce one message more
    receive  wait for the announcement, read the entry, and use the tensors in the sender's memory

An entry of a channel gives the position of its message. Entries are reused in every step, as a step begins
when all messages of the previous one have arrived. Nothing is posted ahead. A sent tensor is free at once.

Autograd keeps a received tensor as long as a backward needs it, and nothing else knows when that ends: so
the receiver counts the users of its storage, as `penstock.runtime.transport.buffers` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
from torch import Tensor, UntypedStorage

from penstock.batch.payload import EdgeSpecs, Payload, pack_specs, unpack_specs
from penstock.errors import RunError
from penstock.private import storage_use_count
from penstock.runtime.health.watch import Watch
from penstock.runtime.plan import Action, Exchange, Free
from penstock.runtime.shared_memory.blocks import Blocks, free_block
from penstock.runtime.shared_memory.segment import CHANNELS, RINGS, Segment
from penstock.runtime.transport.interface import Messages, on_wire, restored
from penstock.schedule.order import Channel, Message

ENTRIES = 1 << 16  # of a channel, in one step
_ENTRY = 8  # words, of which a RingEntry fills five
_ALIGNED = 64  # bytes
_SENT, _TAKEN, _FREED = range(3)  # words of a channel: messages that were sent, bytes taken, bytes freed
_CHANNEL = 8  # words, a cache line


class RingEntry(NamedTuple):
    """The position of a message: its block, its bytes, and those of the specs before it, if it has some."""

    block: int
    at: int
    nbytes: int
    header: int
    microbatch: int


class ChannelEnd:
    """One end of a channel: its words, its entries, and the messages that went through it.

    segment: the sender's; index: of the channel among those of the sender
    """

    def __init__(self, segment: Segment, index: int) -> None:
        self.segment, self.words = segment, segment.words
        self.word = CHANNELS + index * _CHANNEL
        self._ring = RINGS // 8 + index * ENTRIES * _ENTRY
        self.count = self._first = 0  # messages so far, and before this step

    def entry(self) -> int:
        """The first word of the next message's entry."""
        index = self.count - self._first
        if index >= ENTRIES:
            rule = f"a step takes up to {ENTRIES} of them over shared memory"
            raise RunError(f"{index + 1} microbatches", rule, "Take fewer, or transport='gloo'")
        self.count += 1
        return self._ring + index * _ENTRY

    def end_step(self) -> None:
        self._first = self.count


class SharedMessages(Messages):
    """The messages of one rank, over the segments of all ranks.

    Args:
        segments: by rank.
        hosts: the rank of each stage.
        wire: the dtype in which floating-point tensors travel; None leaves them as they are.
        spin: see Segment.wait
    """

    needless: frozenset[type[Action]] = frozenset({Exchange, Free})
    carried_by = "shared memory"

    def __init__(
        self,
        rank: int,
        segments: Sequence[Segment],
        channels: Sequence[Channel],
        hosts: Sequence[int],
        wire: torch.dtype | None,
        watch: Watch,
        limit: timedelta,
        spin: bool,
    ) -> None:
        self._hosts, self._wire, self._watch, self._limit, self._spin = hosts, wire, watch, limit, spin
        self._segment, self._blocks = segments[rank], Blocks(segments[rank])
        self._outgoing: dict[Channel, ChannelEnd] = {}
        self._incoming: dict[Channel, Arrivals] = {}
        indices = [0] * len(segments)
        for channel in channels:
            source, target = hosts[channel.source], hosts[channel.target]
            if source == rank:
                self._outgoing[channel] = ChannelEnd(segments[source], indices[source])
            elif target == rank:
                self._incoming[channel] = Arrivals(segments[source], indices[source], wire)
            indices[source] += 1
        assert max(indices) <= (RINGS // 8 - CHANNELS) // _CHANNEL, (
            "more channels than a segment has words for"
        )
        self._expected: dict[Message, EdgeSpecs | None] = {}

    # ---- receiving

    def post(self, message: Message, specs: EdgeSpecs | None) -> None:
        self._expected[message] = specs

    def arrived(self, message: Message) -> bool:
        return True  # `receive` waits for it

    def receive(self, message: Message) -> Payload:
        specs, arrivals = self._expected.pop(message), self._incoming[message.channel]
        arrivals.free()  # the sender may need them
        while (payload := arrivals.take(message.op.microbatch, specs)) is None:
            if not arrivals.ready:
                with self._watch.waiting(message, self._hosts[message.op.stage]):
                    arrivals.wait(self._limit, self._spin)
            arrivals.read()
        return payload

    # ---- sending

    def send(self, message: Message, payload: Payload, with_specs: bool) -> None:
        for arrivals in self._incoming.values():
            arrivals.free()  # the op that made this payload has dropped its inputs
        end = self._outgoing[message.channel]
        text = pack_specs(payload.specs) if with_specs else b""
        specs = on_wire(payload.specs, self._wire)
        nbytes = _aligned(len(text)) + sum([_aligned(spec.nbytes) for spec in specs])
        block = self._blocks.take(nbytes)
        segment, at = self._segment, block.at
        if text:
            packed = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            segment.tensor(at, packed.shape, torch.uint8).copy_(packed)
            at += _aligned(len(text))
        for tensor, spec in zip(payload.tensors, specs, strict=True):
            segment.tensor(at, spec.shape, spec.dtype).copy_(tensor.detach())
            at += _aligned(spec.nbytes)
        entry = RingEntry(block.index, block.at, nbytes, len(text), message.op.microbatch)
        word = end.entry()
        end.words[word : word + len(entry)] = list(entry)
        segment.announce(end.word + _SENT, end.count)

    # ---- state

    @property
    def pending(self) -> int:
        return len(self._expected) + sum([len(arrivals.early) for arrivals in self._incoming.values()])

    @property
    def buffer_bytes(self) -> int:
        """Bytes of messages under way, and of idle blocks. The receiver counts messages that have arrived."""
        arrived = 0
        for end in self._outgoing.values():
            arrived += end.words[end.word + _TAKEN] - end.words[end.word + _FREED]
        return self._blocks.nbytes - arrived

    def end_step(self) -> None:
        for end in (*self._outgoing.values(), *self._incoming.values()):
            end.end_step()
        self._blocks.trim()

    def close(self) -> None:
        self._segment.end()


class Arrivals(ChannelEnd):
    """The receiver's end of a channel. early: entries that were read before their message was needed"""

    def __init__(self, segment: Segment, index: int, wire: torch.dtype | None) -> None:
        super().__init__(segment, index)
        self._wire = wire
        self._in_use: list[tuple[RingEntry, list[UntypedStorage]]] = []  # entries whose blocks are in use
        self._taken = self._freed = 0  # bytes
        self.early: dict[int, RingEntry] = {}  # by microbatch

    @property
    def ready(self) -> bool:
        return self.words[self.word + _SENT] > self.count

    def wait(self, limit: timedelta, spin: bool) -> None:
        """Wait for one message more."""
        self.segment.wait(self.word + _SENT, self.count + 1, limit, spin)

    def read(self) -> None:
        word = self.entry()
        entry = RingEntry(*self.words[word : word + len(RingEntry._fields)])
        self.early[entry.microbatch] = entry

    def take(self, microbatch: int, specs: EdgeSpecs | None) -> Payload | None:
        """The message of that microbatch, if its entry was read. specs: None where it carries them"""
        entry = self.early.pop(microbatch, None)
        if entry is None:
            return None
        if specs is None:
            packed = self.segment.tensor(entry.at, (entry.header,), torch.uint8)
            specs = unpack_specs(bytes(packed.numpy()))
        tensors, begin = list[Tensor](), _aligned(entry.header)
        for spec in on_wire(specs, self._wire):  # one behind the other, each in a storage of its own
            tensors.append(self.segment.separate(entry.at + begin, spec.shape, spec.dtype))
            begin += _aligned(spec.nbytes)
        assert begin == entry.nbytes, f"a message of {entry.nbytes} bytes where {begin} were expected"
        self._in_use.append((entry, [tensor.untyped_storage() for tensor in tensors]))
        self._taken += entry.nbytes
        self.words[self.word + _TAKEN] = self._taken
        return Payload(restored(tensors, specs), specs)

    def free(self) -> None:
        """Free the blocks whose tensors have no other user."""
        unused, in_use = list[RingEntry](), []
        for entry, storages in self._in_use:
            if any(storage_use_count(storage._cdata) > 1 for storage in storages):
                in_use.append((entry, storages))
            else:
                unused.append(entry)
        if unused:
            self._in_use = in_use
            # first, or the sender could count a block as taken that it has emptied
            self._freed += sum([entry.nbytes for entry in unused])
            self.words[self.word + _FREED] = self._freed
            for entry in unused:
                free_block(self.segment, entry.block)

    def end_step(self) -> None:
        super().end_step()
        self.free()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED
