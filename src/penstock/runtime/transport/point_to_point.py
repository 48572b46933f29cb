"""Sends and receives over torch.distributed: one by one or in batches, and when a send is complete.

A channel is addressed by a `P2PGroup`. `OneByOne` starts each tensor at once. `Batches` starts together
what was posted and sent since the last `start`, as penstock.schedule.order has proven possible: NCCL moves
a batch in one kernel, and batches one after the other; on gloo each tensor goes by itself, and waiting for
one waits for all of its batch and of the batches before, so that what runs is what was proven. Where torch
is built with `ring_exchange` (a private build, as Megatron's `use_ring_exchange_p2p` needs), a batch goes
through it if it fits and may be waited for.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import NamedTuple, Protocol

import torch.distributed as dist
from torch import Tensor

from penstock.runtime.transport.groups import FOREVER

_LINGERS = 1.0  # seconds


class Work(Protocol):
    """The part of torch.distributed.Work that is used here."""

    def wait(self, timeout: timedelta = ...) -> bool: ...
    def is_completed(self) -> bool: ...


class P2PGroup(NamedTuple):
    """How a channel is addressed: in `group`, from its rank `source` to its rank `target`, under `tag`."""

    group: dist.ProcessGroup
    source: int
    target: int
    tag: int


class OneByOne:
    """Each tensor starts at once; on each P2PGroup they pair up in the order of the calls.

    Raises RuntimeError where a connection is gone.
    """

    def send(self, p2p: P2PGroup, tensors: Sequence[Tensor]) -> Sequence[Work]:
        """The works to wait for until the tensors have left."""
        return [p2p.group.send([tensor], p2p.target, p2p.tag) for tensor in tensors]

    def receive(self, p2p: P2PGroup, buffers: Sequence[Tensor]) -> Sequence[Work]:
        """The works to wait for until the tensors are here."""
        return [p2p.group.recv([buffer], p2p.source, p2p.tag) for buffer in buffers]

    def start(self, in_line: bool) -> None:
        """Start, at the latest, what was sent and received since the last call: here it has started.

        in_line: whether it may wait until that is over
        """


# at most one tensor to and one from each of the two neighbours in a ring of ranks
RingExchange = Callable[..., None]


def ring_exchange() -> RingExchange | None:
    """torch.distributed.ring_exchange, in a build of torch that has it."""
    return getattr(dist, "ring_exchange", None)


class Batches(OneByOne):
    """Starts all messages since the last `start` in one call. All channels are in one group."""

    def __init__(self, group: dist.ProcessGroup, ring: RingExchange | None = None) -> None:
        self._group, self._ring = group, ring
        self._ops: list[dist.P2POp] = []
        self._next = self._batch(None)

    def _batch(self, before: P2PBatch | None) -> P2PBatch:
        return P2PBatch(before)

    def send(self, p2p: P2PGroup, tensors: Sequence[Tensor]) -> list[Work]:
        return self._add(dist.isend, tensors, p2p.target, p2p.tag)

    def receive(self, p2p: P2PGroup, buffers: Sequence[Tensor]) -> list[Work]:
        return self._add(dist.irecv, buffers, p2p.source, p2p.tag)

    def _add(self, op: Callable[..., object], tensors: Sequence[Tensor], peer: int, tag: int) -> list[Work]:
        group = self._group
        self._ops += [dist.P2POp(op, tensor, group=group, tag=tag, group_peer=peer) for tensor in tensors]
        return [self._next]

    def start(self, in_line: bool) -> None:
        ops, self._ops = self._ops, []
        batch, self._next = self._next, self._batch(self._next)
        batch.begin(self._start(ops, in_line) if ops else [])  # a message may hold no tensor

    def _start(self, ops: list[dist.P2POp], in_line: bool) -> Sequence[Work]:
        if self._ring is not None and in_line:  # a ring exchange returns when it is over
            sides = ring_arguments(ops, self._group.rank(), self._group.size())
            if sides is not None:
                self._ring(**sides, group=self._group)
                return []
        return dist.batch_isend_irecv(ops)


def ring_arguments(ops: Sequence[dist.P2POp], rank: int, size: int) -> dict[str, Tensor | None] | None:
    """The tensors of a ring exchange by argument; None where the ops do not fit one.

    In a ring of two each rank is both neighbours of the other, and counts as the previous one.
    """
    sides = {(rank + 1) % size: "next", (rank - 1) % size: "prev"}
    arguments: dict[str, Tensor | None] = {
        f"tensor_{verb}_{side}": None for verb in ("send", "recv") for side in ("prev", "next")
    }
    for op in ops:
        argument = f"tensor_{'send' if op.op is dist.isend else 'recv'}_{sides.get(op.group_peer)}"
        if argument not in arguments or arguments[argument] is not None:
            return None
        arguments[argument] = op.tensor
    return arguments


class P2PBatch:
    """Transfers that started together, waited for as one. `before`: the batch that must complete first."""

    def __init__(self, before: P2PBatch | None) -> None:
        self._before = before
        self._works: list[Work] | None = None

    def begin(self, works: Sequence[Work]) -> None:
        self._works = list(works)

    def wait(self, timeout: timedelta = FOREVER) -> bool:
        chain: list[P2PBatch] = []
        batch: P2PBatch | None = self
        while batch is not None:
            chain.append(batch)
            batch = batch._before
        while chain:
            chain.pop()._finish(timeout)
        return True

    def _finish(self, timeout: timedelta) -> None:
        assert self._works is not None, "it has not begun"
        while self._works:  # gloo does not allow a second wait
            self._works[0].wait(timeout)
            del self._works[0]
        self._before = None

    def is_completed(self) -> bool:
        """The batches before are complete then, too: NCCL runs them in order, and `wait` waits in order."""
        return self._works is not None and all(work.is_completed() for work in self._works)


# ---- Send completion
#
# A message is held until it has been sent, and no longer. gloo cannot be asked whether a send is complete;
# it can only be waited for, and only once. So a thread waits, one for each channel: a slow channel must not
# hold up the memory of another one. NCCL can be asked, and needs no thread.


class Sending:
    """A message on its way, with the tensors that it is read from.

    Args:
        nbytes: the bytes that completion frees.
        start: starts the send, in the thread that waits for it, where the tensors are not ready yet.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        nbytes: int,
        works: Sequence[Work] = (),
        start: Callable[[], Sequence[Work]] | None = None,
    ) -> None:
        self.nbytes = nbytes
        self._tensors, self._works, self._start = tensors, works, start
        self._over = threading.Event()
        self.in_thread = False  # whether a SendCompletion waits for it
        self._error: RuntimeError | None = None

    @property
    def over(self) -> bool:
        return self._over.is_set()

    @property
    def failed(self) -> bool:
        return self._error is not None

    def poll(self) -> None:
        """Free the tensors if they have been sent, without waiting. Not on gloo."""
        if all(work.is_completed() for work in self._works):
            self._free()

    def finish(self, timeout: timedelta) -> None:
        """Make sure that the message has been sent. Raises RuntimeError if that fails or takes too long."""
        if not self.in_thread:
            self.wait(timeout)
        elif not self._over.wait(timeout.total_seconds()):
            raise RuntimeError("the send timed out")
        if self._error is not None:
            raise self._error

    def wait(self, timeout: timedelta) -> None:
        """Free the tensors once they have been sent. Never raises: `finish` does."""
        try:
            for work in self._works if self._start is None else self._start():
                work.wait(timeout)
                del work  # it holds the tensors too, and they must be gone when `over` is set
        except Exception as error:  # nothing may end the thread: a Free would wait for ever
            self._error = error if isinstance(error, RuntimeError) else RuntimeError(repr(error))
        self._free()

    def _free(self) -> None:
        self._tensors, self._works, self._start, self.nbytes = (), (), None, 0
        self._over.set()


class SendCompletion:
    """A thread that waits for the sends on one channel, in the order in which they were started."""

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[Sending | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"penstock-sends-{name}", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a thread that wakes up while Python ends may abort the process

    def watch(self, sending: Sending) -> None:
        sending.in_thread = True
        self._queue.put(sending)

    def close(self) -> None:
        atexit.unregister(self.close)
        self._queue.put(None)
        self._thread.join(_LINGERS)  # not for ever: after a failed step a send may never end

    def _run(self) -> None:
        while (sending := self._queue.get()) is not None:
            sending.wait(FOREVER)
            del sending  # or it would live on while this waits for the next one
