"""Sends and receives over torch.distributed: one by one or in batches, and when a send is complete.

A channel is addressed by a `P2PGroup`. `OneByOne` starts each tensor at once. `Batches`, of NCCL, start
together what was posted and sent since the last `start`, as penstock.schedule.order has proven possible: NCCL
moves a batch in one kernel, and batches one after the other.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
from datetime import timedelta
from threading import Event
from typing import NamedTuple, Protocol

import torch.distributed as dist
from torch import Tensor

from penstock.runtime.health.limits import CallThread
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

    def start(self) -> None:
        """Start, at the latest, what was sent and received since the last call: here it has started."""


class P2PBatch:
    """Transfers that start together, waited for as one. On NCCL they come after those of the batch before."""

    def __init__(self) -> None:
        self._works: Sequence[Work] | None = None

    def begin(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self, timeout: timedelta = FOREVER) -> bool:
        assert self._works is not None, "it has not begun"
        for work in self._works:
            work.wait()
        return True

    def is_completed(self) -> bool:
        return self._works is not None and all(work.is_completed() for work in self._works)


class Batches(OneByOne):
    """Starts all messages since the last `start` in one call. All channels are in one group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._next = group, P2PBatch()
        self._ops: list[dist.P2POp] = []

    def send(self, p2p: P2PGroup, tensors: Sequence[Tensor]) -> list[Work]:
        return self._add(dist.isend, tensors, p2p.target, p2p.tag)

    def receive(self, p2p: P2PGroup, buffers: Sequence[Tensor]) -> list[Work]:
        return self._add(dist.irecv, buffers, p2p.source, p2p.tag)

    def _add(self, op: Callable[..., object], tensors: Sequence[Tensor], peer: int, tag: int) -> list[Work]:
        group = self._group
        self._ops += [dist.P2POp(op, tensor, group=group, tag=tag, group_peer=peer) for tensor in tensors]
        return [self._next]

    def start(self) -> None:
        ops, self._ops = self._ops, []
        batch, self._next = self._next, P2PBatch()
        batch.begin(dist.batch_isend_irecv(ops) if ops else [])  # a message may hold no tensor


# ---- Send completion
#
# A message is held until it has been sent, and no longer. gloo cannot be asked whether a send is complete;
# it can only be waited for, and only once. So a thread waits, one for each channel: a slow channel must not
# hold up the memory of another one. NCCL can be asked, and needs no thread.


class Sending:
    """A message on its way over gloo, with the tensors that it is read from.

    Args:
        nbytes: the bytes that completion frees.
        start: starts the send, in the thread that waits for it. Returns the works to wait for
    """

    def __init__(self, tensors: Sequence[Tensor], nbytes: int, start: Callable[[], Sequence[Work]]) -> None:
        self.nbytes = nbytes
        self._tensors, self._start = tensors, start
        self._over = Event()
        self._error: RuntimeError | None = None

    @property
    def over(self) -> bool:
        return self._over.is_set()

    @property
    def failed(self) -> bool:
        return self._error is not None

    def finish(self, timeout: timedelta) -> None:
        """Make sure that the message has been sent. Raises RuntimeError if that fails or takes too long."""
        if not self._over.wait(timeout.total_seconds()):
            raise RuntimeError("the send timed out")
        if self._error is not None:
            raise self._error

    def run(self) -> None:
        """Free the tensors once they have been sent. Never raises: `finish` does."""
        try:
            for work in self._start():
                work.wait(FOREVER)
                del work  # it holds the tensors too, and they must be gone when `over` is set
        except Exception as error:  # nothing may end the thread: a Free would wait for ever
            self._error = error if isinstance(error, RuntimeError) else RuntimeError(repr(error))
        self._tensors, self._start, self.nbytes = (), list, 0
        self._over.set()


class SendThread(CallThread):
    """The thread that runs the sends on one channel, in the order in which they were made."""

    def __init__(self, name: str) -> None:
        super().__init__(f"penstock-sends-{name}")
        atexit.register(self.close)  # a thread that wakes up while Python ends may abort the process

    def close(self, seconds: float = _LINGERS) -> None:
        """Wait a little, and not for ever: after a failed step a send may never end."""
        atexit.unregister(self.close)
        super().close(seconds)
