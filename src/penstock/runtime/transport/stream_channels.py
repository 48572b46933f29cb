"""Channels over NCCL, where messages move on streams of the GPU and the host runs ahead of them.

    receive    the compute stream waits for the message; the host goes on
    free       drops a send that has left, or keeps it until it has
    complete   once a step: the host waits until all messages have moved, up to the time limit

NCCL connects two ranks in the first message between them, and blocks both hosts until both have reached it.
In the order of a schedule each of two ranks may reach another message first. So all channels are connected
when they are made, in one order on all ranks: both ranks of the first channel that is not connected yet wait
for each other, and for nothing else.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
from torch import Tensor

from penstock.batch.payload import Payload, TensorSpec
from penstock.runtime.device import stream
from penstock.runtime.health.watch import Watch
from penstock.runtime.ranks import GroupRanks
from penstock.runtime.transport.channels import Channels
from penstock.runtime.transport.groups import Groups
from penstock.runtime.transport.point_to_point import Batches, Work
from penstock.schedule.order import Channel, Message

# The host keeps the tensors of a send until it is complete, so it may not run ahead without limit: this is
# the most messages that the plan has proven to have arrived, but that are not known to have left.
_AHEAD = 8
_SHORTEST, _LONGEST = 2e-5, 2e-4  # seconds between two polls of a transfer
_ASK = 0.2  # seconds between two checks for the failure of another rank


class Transfer:
    """One message under way, with the tensors that it is read from."""

    def __init__(self, what: Message | str, peer: int, works: Sequence[Work], tensors: Sequence[Tensor] = (),
                 nbytes: int = 0) -> None:  # fmt: skip
        self.what, self.peer, self.nbytes = what, peer, nbytes
        self._works, self._tensors = works, tensors

    def over(self) -> bool:
        """Whether the transfer is complete; its tensors are then freed. Raises RuntimeError if it failed."""
        if not all(work.is_completed() for work in self._works):
            return False
        for work in self._works:
            work.wait()  # raises NCCL's error
        self._works, self._tensors, self.nbytes = (), (), 0
        return True


class StreamChannels(Channels):
    """The channels of one rank, over NCCL. Collective: it connects them.

    Args: as for Channels.
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
        super().__init__(groups, channels, hosts, device, wire, watch, batched=batched)
        if batched:
            self._p2p = self._batches(groups)
        self._stream = stream.stream_of(device)
        self._sent: dict[Message, Transfer] = {}
        self._transfers: deque[Transfer] = deque()  # in the order of the compute stream
        self._freed: deque[Transfer] = deque()  # sends that the plan has proven to have arrived
        self._connect(groups, channels)

    def _batches(self, groups: Groups) -> Batches:
        group = next(iter(self._p2p_groups.values())).group if self._p2p_groups else groups.pipeline
        # torch: all ranks of a group take part in its first call
        GroupRanks(group, self._limit, self._at).all_gather(torch.zeros(1, device=self._at))
        return Batches(group)

    def _connect(self, groups: Groups, channels: Sequence[Channel]) -> None:
        """Send a byte over every channel."""
        for channel in channels:
            ends = source, target = self._hosts[channel.source], self._hosts[channel.target]
            if groups.rank not in ends:
                continue
            peer = target if groups.rank == source else source
            moves = self._p2p.send if groups.rank == source else self._p2p.receive
            byte = self._pool.take(TensorSpec((1,), torch.uint8))
            connection = f"the connection of stages {channel.source} and {channel.target}"
            with self._watch.waiting(connection, peer):
                works = moves(self._p2p_groups[channel], [byte])
                self._p2p.start()
            self._reach(Transfer(connection, peer, works, [byte]))

    # ---- receiving

    def _finish(self, works: Sequence[Work], message: Message, read: bool = False) -> None:
        peer = self._hosts[message.op.stage]
        try:
            for work in works:
                work.wait()
        except RuntimeError as cause:
            raise self._watch.error(cause, message, peer) from cause
        transfer = Transfer(message, peer, works)
        if read:
            self._reach(transfer)
        else:
            self._transfers.append(transfer)

    # ---- sending

    def send(self, message: Message, payload: Payload, with_specs: bool) -> None:
        ahead, tensors, nbytes = self._outgoing(payload, with_specs)
        tensors = [*ahead, *tensors]
        works = self._send(message, tensors)
        transfer = Transfer(message, self._hosts[message.target], works, tensors, nbytes)
        self._sent[message] = transfer
        self._transfers.append(transfer)
        self._pool.drop_idle()  # the op that made this payload has freed its inputs
        self._drop_complete()

    def free(self, message: Message) -> None:
        """Drop a message that has left, or else keep it until it has."""
        self._freed.append(self._sent.pop(message))
        self._drop_complete()
        while len(self._freed) > _AHEAD:
            self._reach(self._freed.popleft())

    def complete(self) -> None:
        while self._transfers:
            self._reach(self._transfers.popleft())
        self._freed.clear()
        moment = self._stream.now()
        assert not isinstance(moment, float)
        hold_up_until(moment.query, "what its GPU computes with them", None, self._watch, self._limit)

    # ---- state

    @property
    def pending(self) -> int:
        return super().pending + len(self._sent) + len(self._transfers)

    @property
    def buffer_bytes(self) -> int:
        return super().buffer_bytes + sum([transfer.nbytes for transfer in self._transfers])

    # ---- waiting

    def _drop_complete(self) -> None:
        self._transfers = deque(t for t in self._transfers if not self._is_over(t))
        self._freed = deque(t for t in self._freed if not self._is_over(t))

    def _is_over(self, transfer: Transfer) -> bool:
        try:
            return transfer.over()
        except RuntimeError as cause:
            raise self._watch.error(cause, transfer.what, transfer.peer) from cause

    def _reach(self, transfer: Transfer) -> None:
        """Make the host wait until the transfer is complete."""
        hold_up_until(transfer.over, transfer.what, transfer.peer, self._watch, self._limit)


def hold_up_until(
    over: Callable[[], bool], what: Message | str, peer: int | None, watch: Watch, limit: timedelta
) -> None:
    """Make the host wait until `over` returns True, which depends on other ranks.

    Raises the typed error where that takes too long, fails, or cannot happen because another rank has failed.
    """
    with watch.waiting(what, peer):
        began, pause = time.monotonic(), _SHORTEST
        ask = began + _ASK
        while not over():
            now = time.monotonic()
            if now - began > limit.total_seconds():
                raise RuntimeError("timed out waiting for NCCL")
            if now > ask:
                if watch.broken:
                    raise RuntimeError("another rank has failed")
                ask = now + _ASK
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)
