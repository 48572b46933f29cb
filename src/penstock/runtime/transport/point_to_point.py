"""Sends and receives over torch.distributed: one by one or in batches, and when a send is complete.

A channel is addressed by a `P2PGroup`. `OneByOne` starts each tensor at once. `Batches`, for NCCL, starts
everything that was posted and sent since the last `start` together, as penstock.schedule.order has proven
possible: NCCL moves a batch in one kernel, and batches one after the other.
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
    """Starts each tensor at once; sends and receives of a P2PGroup pair up in the order of the calls.

    Raises RuntimeError where a connection is lost.
    """

    def send(self, p2p: P2PGroup, tensors: Sequence[Tensor]) -> Sequence[Work]:
        """Start to send the tensors. Returns works, which are complete once these have left."""
        return [p2p.group.send([tensor], p2p.target, p2p.tag) for tensor in tensors]

    def receive(self, p2p: P2PGroup, buffers: Sequence[Tensor]) -> Sequence[Work]:
        """Start to receive into `buffers`. Returns works, which are complete once these are filled."""
        return [p2p.group.recv([buffer], p2p.source, p2p.tag) for buffer in buffers]

    def start(self) -> None:
        """Start the sends and receives since the last call, unless they have started, as here."""


class P2PBatch:
    """Transfers that start together and complete together; NCCL runs batches one after the other."""

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
# A message is freed as soon as it has been sent. On gloo one cannot poll whether a send is complete, but only
# wait for it, and only once. So a thread waits, one for each channel, since a slow channel must not keep the
# memory of others. A send over NCCL can be polled, and needs no thread.


class Sending:
    """A message under way over gloo, with the tensors that it is read from.

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
                del work  # it refers to the tensors too, which must be free when `over` is set
        except Exception as error:  # no error may end the thread: a Free would wait for ever
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
