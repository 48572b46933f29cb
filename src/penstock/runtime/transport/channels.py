"""One rank's ends of the channels, over torch.distributed.

    post --> receive buffer from the pool --> receive --> wait --> payload
    send --> contiguous, narrowed, staged tensors --> send --> completion frees them

Messages on a channel pair up independently of other channels. On NCCL each channel has a process group of its
own, or all share one where messages go in batches. On gloo each has a tag, in one group for activations and
one for gradients: with one group for both, steps of small ops took half as long again, and each further group
keeps a thread that wakes a hundred times a second while the rank computes. Here the host waits for a message;
in stream_channels.py the GPU's stream does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.batch.payload import EdgeSpecs, Payload, TensorSpec, pack_specs, unpack_specs
from penstock.runtime.device.copies import CudaCopies
from penstock.runtime.health.watch import Watch
from penstock.runtime.transport.buffers import Pool, Staging
from penstock.runtime.transport.groups import Groups
from penstock.runtime.transport.interface import Messages, narrowed, on_wire, restored
from penstock.runtime.transport.point_to_point import (
    OneByOne,
    P2PGroup,
    Sending,
    SendThread,
    Work,
)
from penstock.schedule.order import Channel, Message

# sent before a message whose receiver does not know its specs: their length, and the specs if they fit
_HEADER_BYTES = 1024
_LENGTH_BYTES = 4


def open_p2p_groups(
    groups: Groups, channels: Sequence[Channel], hosts: Sequence[int], batched: bool = False
) -> dict[Channel, P2PGroup]:
    """Make the process groups of the channels. Collective.

    Args:
        hosts: the rank of each stage.
        batched: whether messages go in batches, on NCCL.
    """
    ends = {channel: (hosts[channel.source], hosts[channel.target]) for channel in channels}
    if groups.backend == "nccl" and not batched:
        return {
            channel: P2PGroup(
                groups.new(ends[channel], f"pp channel {channel.source} to {channel.target}", messages=True),
                int(ends[channel][0] > ends[channel][1]),
                int(ends[channel][1] > ends[channel][0]),
                0,
            )
            for channel in channels
        }
    if groups.backend == "nccl":  # its options are those of messages, and it can be aborted
        activations = gradients = groups.new(range(groups.size), "pp messages", messages=True)
    else:
        activations, gradients = groups.pipeline, groups.new(range(groups.size), "pp gradients")
    return {
        channel: P2PGroup(activations if channel.source < channel.target else gradients, *ends[channel], tag)
        for tag, channel in enumerate(channels, start=1)
    }


class Receiving(NamedTuple):
    """A posted message.

    specs: None until its header has arrived; then the header is its one tensor
    """

    works: Sequence[Work]
    tensors: tuple[Tensor, ...]
    specs: EdgeSpecs | None


class Channels(Messages):
    """The channels of one rank, over gloo.

    Args:
        hosts: the rank of each stage.
        wire: the dtype in which floating-point tensors travel; None leaves them as they are.
        batched: whether everything that is posted and sent before a `start` goes together; on NCCL.
    """

    def __init__(
        self,
        groups: Groups,
        channels: Sequence[Channel],
        hosts: Sequence[int],
        device: torch.device,
        wire: torch.dtype | None,
        watch: Watch,
        *,
        batched: bool = False,
    ) -> None:
        self.carried_by = groups.backend + (", batched" if batched else "")
        self._p2p_groups = open_p2p_groups(groups, channels, hosts, batched)
        self._hosts, self._wire, self._watch = hosts, wire, watch
        self._limit, self._at = groups.limit, groups.control_device(device)
        self._p2p = OneByOne()
        staged = groups.backend == "gloo" and device.type == "cuda"
        self._pool = Pool(torch.device("cpu"), pinned=True) if staged else Pool(device)
        self._staging = Staging(self._pool, CudaCopies(device)) if staged else None
        self._threads = {
            channel: SendThread(f"{channel.source}-to-{channel.target}")
            for channel in channels
            if groups.backend == "gloo" and hosts[channel.source] == groups.rank
        }
        self._posted: dict[Message, Receiving] = {}
        self._posted_bytes = 0
        self._sending: dict[Message, Sending] = {}
        # by channel, the posted messages that carry their specs; only the first one's header is posted
        self._unknown: dict[Channel, deque[Message]] = {}
        self._early: dict[Message, Payload] = {}  # received before they were needed

    # ---- receiving

    def post(self, message: Message, specs: EdgeSpecs | None) -> None:
        if specs is None:
            queue = self._unknown.setdefault(message.channel, deque())
            queue.append(message)
            if len(queue) > 1:  # the channel's next tensors belong to an earlier message
                return
        self._post(message, specs)

    def _post(self, message: Message, specs: EdgeSpecs | None) -> None:
        header = TensorSpec((_HEADER_BYTES,), torch.uint8)
        buffers = (self._pool.take(header),) if specs is None else self._buffers(specs)
        self._posted[message] = Receiving(self._receive(message, buffers), buffers, specs)
        self._posted_bytes += _nbytes(buffers)

    def _buffers(self, specs: EdgeSpecs) -> tuple[Tensor, ...]:
        return tuple([self._pool.take(spec) for spec in on_wire(specs, self._wire)])

    def _receive(self, message: Message, buffers: tuple[Tensor, ...]) -> Sequence[Work]:
        try:
            return self._p2p.receive(self._p2p_groups[message.channel], buffers)
        except RuntimeError as cause:
            raise self._watch.error(cause, message, self._hosts[message.op.stage]) from cause

    def arrived(self, message: Message) -> bool:
        return True  # `receive` waits for it

    def receive(self, message: Message) -> Payload:
        queue = self._unknown.get(message.channel)
        while queue and queue[0] != message and message in queue:  # used in another order than sent
            first = queue[0]
            self._early[first] = self._receive_next(first)
        early = self._early.pop(message, None)
        return early if early is not None else self._receive_next(message)

    def _receive_next(self, message: Message) -> Payload:
        works, buffers, specs = self._posted.pop(message)
        self._posted_bytes -= _nbytes(buffers)
        self._finish(works, message, read=specs is None)
        if specs is None:
            specs = self._read_header(message, buffers[0])
            buffers = self._buffers(specs)
            self._finish(self._receive(message, buffers), message)
            queue = self._unknown[message.channel]
            queue.popleft()
            if queue:
                self._post(queue[0], None)
        if self._staging is not None:
            buffers = self._staging.up(buffers)
        return Payload(restored(buffers, specs), specs)

    def _read_header(self, message: Message, header: Tensor) -> EdgeSpecs:
        length = int.from_bytes(_bytes(header[:_LENGTH_BYTES]), "big")
        text = header[_LENGTH_BYTES : _LENGTH_BYTES + length]
        if length > len(text):
            text = self._pool.take(TensorSpec((length,), torch.uint8))
            self._finish(self._receive(message, (text,)), message, read=True)
        return unpack_specs(_bytes(text))

    def _finish(self, works: Sequence[Work], message: Message, read: bool = False) -> None:
        """Wait for the works that receive `message`. read: whether the host reads the values next"""
        with self._watch.waiting(message, self._hosts[message.op.stage]):
            for work in works:
                work.wait(self._limit)

    # ---- sending

    def send(self, message: Message, payload: Payload, with_specs: bool) -> None:
        ahead, tensors, nbytes = self._outgoing(payload, with_specs)
        if self._staging is None:
            tensors = [*ahead, *tensors]
            works = self._send(message, tensors)
            sending = Sending(tensors, nbytes, lambda: works)
        else:
            hosts, ready = self._staging.down(tensors)
            tensors = [*ahead, *hosts]

            def start() -> Sequence[Work]:  # in the send thread, as the GPU may still compute the payload
                ready.synchronize()
                return self._p2p.send(self._p2p_groups[message.channel], tensors)

            sending = Sending(tensors, nbytes, start)
        self._sending[message] = sending
        self._pool.drop_idle()  # the op that made this payload has freed its inputs
        self._threads[message.channel].put(sending.run)

    def _outgoing(self, payload: Payload, with_specs: bool) -> tuple[list[Tensor], list[Tensor], int]:
        """The header of a payload, its tensors as they are sent, and the bytes kept only to be sent."""
        ahead = list(self._headers(payload.specs)) if with_specs else []
        tensors = [tensor.contiguous() for tensor in narrowed(payload.tensors, self._wire)]
        pairs = zip(tensors, payload.tensors, strict=True)
        copies = sum([tensor.nbytes for tensor, original in pairs if tensor is not original])
        nbytes = copies or (payload.nbytes if payload.only_sent is None else payload.only_sent)
        return ahead, tensors, nbytes

    def _send(self, message: Message, tensors: Sequence[Tensor]) -> Sequence[Work]:
        try:
            return self._p2p.send(self._p2p_groups[message.channel], tensors)
        except RuntimeError as cause:
            raise self._watch.error(cause, message, self._hosts[message.target]) from cause

    def _headers(self, specs: EdgeSpecs) -> Iterator[Tensor]:
        text = pack_specs(specs)
        header = len(text).to_bytes(_LENGTH_BYTES, "big") + text
        yield self._as_tensor(header[:_HEADER_BYTES].ljust(_HEADER_BYTES, b"\0"))
        if len(header) > _HEADER_BYTES:
            yield self._as_tensor(text)

    def _as_tensor(self, text: bytes) -> Tensor:
        return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self._at)

    def start(self) -> None:
        with self._watch.waiting("an exchange", None):
            self._p2p.start()

    def free(self, message: Message) -> None:
        """Report a failed send when its buffer is freed."""
        sending = self._sending.pop(message)
        if sending.over and not sending.failed:
            return
        with self._watch.waiting(message, self._hosts[message.target]):
            sending.finish(self._limit)

    # ---- state

    @property
    def pending(self) -> int:
        """Messages posted, or sent and not yet known to have left."""
        queued = sum([max(0, len(queue) - 1) for queue in self._unknown.values()])
        return len(self._posted) + queued + len(self._early) + len(self._sending)

    @property
    def buffer_bytes(self) -> int:
        sending = sum([sending.nbytes for sending in self._sending.values()])
        return self._posted_bytes + sending + self._pool.idle_bytes

    def end_step(self) -> None:
        if self._staging is not None:
            self._staging.settle()
        self._pool.trim()

    def close(self) -> None:
        for thread in self._threads.values():
            thread.close()


def _nbytes(tensors: Sequence[Tensor]) -> int:
    return sum([tensor.nbytes for tensor in tensors])


def _bytes(tensor: Tensor) -> bytes:
    return bytes(tensor.tolist())
