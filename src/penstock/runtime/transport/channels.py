"""One rank's ends of the channels, over torch.distributed.

What pairs up on a channel depends on nothing else. On NCCL each channel has a process group of its own. On
gloo each has a tag of its own, in one group for activations and one for gradients: with a single group for
both, steps of small ops took half as long again, and each further group keeps a thread that wakes a hundred
times a second in the middle of what the rank computes. Where messages go in batches, all are in one group.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.batch.payload import EdgeSpecs, Payload, TensorSpec, pack_specs, unpack_specs
from penstock.errors import RunError
from penstock.runtime.health.watch import Watch
from penstock.runtime.plan import Channel, Message
from penstock.runtime.transport.batched import Batches, RingExchange
from penstock.runtime.transport.buffers import Moment, Pool, Staging
from penstock.runtime.transport.emulated import STAMP, Network
from penstock.runtime.transport.groups import Groups
from penstock.runtime.transport.interface import narrowed, on_wire, restored
from penstock.runtime.transport.point_to_point import (
    Carrier,
    OneByOne,
    P2PGroup,
    SendCompletion,
    Sending,
    Work,
)

# of a message whose receiver does not know what it will be: how long its specs are, and the specs if they fit
_HEADER_BYTES = 1024
_LENGTH_BYTES = 4


def has_tags(groups: Groups) -> bool:
    """Whether messages between the same two ranks of a group can be told apart."""
    return groups.backend == "gloo"


def open_p2p_groups(
    groups: Groups, channels: Sequence[Channel], hosts: Sequence[int], batched: bool = False
) -> dict[Channel, P2PGroup]:
    """hosts: by stage, its rank; batched: whether messages go in batches"""
    lanes: dict[Channel, P2PGroup] = {}
    if batched:
        return {channel: P2PGroup(groups.whole, hosts[channel.source], hosts[channel.target], tag)
                for tag, channel in enumerate(channels, start=1)}  # fmt: skip
    if has_tags(groups):
        gradients = groups.new(range(groups.size), "pp gradients")
        for tag, channel in enumerate(channels, start=1):
            group = groups.whole if channel.source < channel.target else gradients
            lanes[channel] = P2PGroup(group, hosts[channel.source], hosts[channel.target], tag)
        return lanes
    for channel in channels:
        source, target = hosts[channel.source], hosts[channel.target]
        group = groups.new((source, target), f"pp channel {channel.source} to {channel.target}")
        lanes[channel] = P2PGroup(group, int(source > target), int(target > source), 0)
    return lanes


class Receiving(NamedTuple):
    """A posted message.

    specs: what it will be; None until its header has come, which is the one tensor then
    stamp: when it was sent, where a slower network is emulated
    """

    works: Sequence[Work]
    tensors: tuple[Tensor, ...]
    specs: EdgeSpecs | None
    stamp: Tensor | None


class Channels:
    """hosts: by stage, its rank; wire: what floating-point tensors travel as, None as they are

    batched: whether all that is posted and sent before a `start` goes together
    network: one to emulate, slower than what there is
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
        network: Network | None = None,
    ) -> None:
        self._lanes = open_p2p_groups(groups, channels, hosts, batched)
        self._carrier: Carrier = Batches(groups.whole, _ring_exchange()) if batched else OneByOne()
        self._hosts, self._wire, self._watch, self._network = hosts, wire, watch, network
        self._limit, self._at = groups.limit, groups.control_device(device)
        staged = groups.backend == "gloo" and device.type == "cuda"
        self._pool = Pool(torch.device("cpu"), pinned=True) if staged else Pool(device)
        self._staging = Staging(device, self._pool) if staged else None
        # none where a send can be asked whether it is over, or is waited for with its batch
        self._reapers = {channel: SendCompletion(f"{channel.source}-to-{channel.target}")
                         for channel in channels
                         if groups.backend == "gloo" and not batched
                         and hosts[channel.source] == groups.rank}  # fmt: skip
        self._posted: dict[Message, Receiving] = {}
        self._posted_bytes = 0
        self._sending: dict[Message, Sending] = {}
        # by channel, those that were posted and will tell what they are; the first one's header is received
        self._in_line: dict[Channel, deque[Message]] = {}
        self._early: dict[Message, Payload] = {}  # received, as they stood in line before another

    def post(self, message: Message, specs: EdgeSpecs | None) -> None:
        if specs is None:
            line = self._in_line.setdefault(message.channel, deque())
            line.append(message)
            if len(line) > 1:  # what comes next on the channel are the tensors of the one before
                return
        self._begin(message, specs)

    def _begin(self, message: Message, specs: EdgeSpecs | None) -> None:
        if specs is None:
            buffers: tuple[Tensor, ...] = (self._pool.take(TensorSpec((_HEADER_BYTES,), torch.uint8)),)
        else:
            buffers = self._buffers(specs)
        stamp = None if self._network is None else self._pool.take(STAMP)
        works = self._receive(message, buffers if stamp is None else (stamp, *buffers))
        self._posted[message] = Receiving(works, buffers, specs, stamp)
        self._posted_bytes += sum([buffer.nbytes for buffer in buffers])

    def _buffers(self, specs: EdgeSpecs) -> tuple[Tensor, ...]:
        return tuple([self._pool.take(spec) for spec in on_wire(specs, self._wire)])

    def _receive(self, message: Message, buffers: tuple[Tensor, ...]) -> Sequence[Work]:
        try:
            return self._carrier.receive(self._lanes[message.channel], buffers)
        except RuntimeError as cause:
            raise self._broken(cause, message, self._hosts[message.op.stage]) from cause

    def receive(self, message: Message) -> Payload:
        line = self._in_line.get(message.channel)
        while line and line[0] != message and message in line:  # taken in another order than sent
            first = line[0]
            self._early[first] = self._receive_next(first)
        early = self._early.pop(message, None)
        return early if early is not None else self._receive_next(message)

    def _receive_next(self, message: Message) -> Payload:
        works, buffers, specs, stamp = self._posted.pop(message)
        self._posted_bytes -= sum([buffer.nbytes for buffer in buffers])
        self._finish(works, message)
        if specs is None:
            specs = self._told(message, buffers[0])
            buffers = self._buffers(specs)
            self._finish(self._receive(message, buffers), message)
            line = self._in_line[message.channel]
            line.popleft()
            if line:
                self._begin(line[0], None)
        if self._network is not None and stamp is not None:
            self._network.hold_back(stamp, sum([buffer.nbytes for buffer in buffers]))
        if self._staging is not None:
            buffers = self._staging.up(buffers)
        return Payload(restored(buffers, specs), specs)

    def _told(self, message: Message, header: Tensor) -> EdgeSpecs:
        """What the header tells of the tensors that come after it."""
        length = int.from_bytes(_bytes(header[:_LENGTH_BYTES]), "big")
        text = header[_LENGTH_BYTES : _LENGTH_BYTES + length]
        if length > len(text):
            text = self._pool.take(TensorSpec((length,), torch.uint8))
            self._finish(self._receive(message, (text,)), message)
        return unpack_specs(_bytes(text))

    def send(self, message: Message, payload: Payload, told: bool) -> None:
        ahead = [] if self._network is None else [self._network.stamp()]
        given = narrowed(payload.tensors, self._wire)
        tensors = [tensor.contiguous() for tensor in given]
        copies = sum(
            [new.nbytes for new, old in zip(tensors, payload.tensors, strict=True) if new is not old]
        )
        nbytes = copies or (payload.nbytes if payload.loose is None else payload.loose)
        if told:
            ahead += self._headers(payload.specs)
        if self._staging is not None:
            tensors, ready = self._staging.down(tensors)
            sending = self._staged([*ahead, *tensors], nbytes, ready, message)
        else:
            tensors = [*ahead, *tensors]
            sending = Sending(tensors, nbytes, self._send(message, tensors))
        self._sending[message] = sending
        self._pool.drop_idle()  # the op that made this has let go of what came in
        if (reaper := self._reapers.get(message.channel)) is not None:
            sending.leave_to(reaper)
        else:
            for earlier in self._sending.values():
                earlier.poll()

    def _staged(self, tensors: list[Tensor], nbytes: int, ready: Moment, message: Message) -> Sending:
        """What may be read from `ready` on."""
        lane = self._lanes[message.channel]
        if message.channel not in self._reapers:  # a batch begins whole
            ready.synchronize()
            return Sending(tensors, nbytes, self._send(message, tensors))

        def start() -> Sequence[Work]:  # in the thread: this one goes on while the GPU still computes
            ready.synchronize()
            return self._carrier.send(lane, tensors)

        return Sending(tensors, nbytes, start=start)

    def _send(self, message: Message, tensors: Sequence[Tensor]) -> Sequence[Work]:
        try:
            return self._carrier.send(self._lanes[message.channel], tensors)
        except RuntimeError as cause:
            raise self._broken(cause, message, self._hosts[message.target]) from cause

    def start(self, in_line: bool) -> None:
        """As a transport has it."""
        try:
            self._carrier.start(in_line)
        except RuntimeError as cause:
            self._watch.begin("an exchange", None)
            raise self._watch.error(cause) from cause

    def _headers(self, specs: EdgeSpecs) -> Iterator[Tensor]:
        text = pack_specs(specs)
        whole = len(text).to_bytes(_LENGTH_BYTES, "big") + text
        yield self._as_tensor(whole[:_HEADER_BYTES].ljust(_HEADER_BYTES, b"\0"))
        if len(whole) > _HEADER_BYTES:
            yield self._as_tensor(text)

    def _as_tensor(self, text: bytes) -> Tensor:
        return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self._at)

    def free(self, message: Message) -> None:
        sending = self._sending.pop(message)
        if sending.over and not sending.failed:
            return
        peer = self._hosts[message.target]
        self._watch.begin(message, peer)
        try:
            sending.finish(self._limit)
        except RuntimeError as cause:
            raise self._broken(cause, message, peer) from cause
        self._watch.end()

    def _finish(self, works: Sequence[Work], message: Message) -> None:
        """Wait for `works`, which bring `message`."""
        peer = self._hosts[message.op.stage]
        self._watch.begin(message, peer)
        try:
            for work in works:
                work.wait(self._limit)
        except RuntimeError as cause:
            raise self._broken(cause, message, peer) from cause
        self._watch.end()

    def _broken(self, cause: RuntimeError, message: Message, peer: int) -> RunError:
        self._watch.begin(message, peer)
        return self._watch.error(cause)

    @property
    def pending(self) -> int:
        """Messages posted, or not yet known to be gone."""
        in_line = sum([max(0, len(line) - 1) for line in self._in_line.values()])
        return len(self._posted) + in_line + len(self._early) + len(self._sending)

    @property
    def buffer_bytes(self) -> int:
        sending = sum([sending.nbytes for sending in self._sending.values()])
        return self._posted_bytes + sending + self._pool.idle_bytes

    def end_step(self) -> None:
        if self._staging is not None:
            self._staging.settle()
        self._pool.trim()

    def close(self) -> None:
        for reaper in self._reapers.values():
            reaper.close()


def _ring_exchange() -> RingExchange | None:
    """Of some builds of torch."""
    return getattr(dist, "ring_exchange", None)


def _bytes(tensor: Tensor) -> bytes:
    return bytes(tensor.tolist())
