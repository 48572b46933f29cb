"""Lets go of what was sent as soon as it has been sent, while the rank computes.

gloo cannot be asked whether a send has finished; it can only be waited for, and once at that. So a thread
waits, one for each channel: what goes over one channel must not hold up the memory of what goes over another.
NCCL can be asked, and needs no thread.
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

_LINGERS = 1.0  # seconds
FOREVER = timedelta(days=30)  # in the thread, which nobody waits for: the plan's Free has the deadline


class Work(Protocol):
    """Of torch.distributed, as far as it is used here."""

    def wait(self, timeout: timedelta = ...) -> bool: ...
    def is_completed(self) -> bool: ...


class Sending:
    """A message on its way, and the tensors that it is read from: held until it has been sent, not longer.

    nbytes: what letting go of them gives free
    start: starts the send, in the thread that waits for it, where the tensors are not ready at once
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
        self._reaper: SendCompletion | None = None
        self._error: RuntimeError | None = None

    @property
    def over(self) -> bool:
        return self._over.is_set()

    @property
    def failed(self) -> bool:
        return self._error is not None

    def poll(self) -> None:
        """Let go if it has been sent, without waiting. Not on gloo."""
        if all(work.is_completed() for work in self._works):
            self._let_go()

    def finish(self, timeout: timedelta) -> None:
        """Be sure that it has been sent. Raises RuntimeError where that fails or takes too long."""
        if self._reaper is None:
            self.wait(timeout)
        elif not self._over.wait(timeout.total_seconds()):
            raise RuntimeError("the send timed out")
        if self._error is not None:
            raise self._error

    def wait(self, timeout: timedelta) -> None:
        """Let go when it has been sent. Never raises: who has to know calls `finish`."""
        try:
            for work in self._works if self._start is None else self._start():
                work.wait(timeout)
                del work  # it holds the tensors too, and they are to be gone when this says that it is over
        except Exception as error:  # nothing may end the thread: who waits would wait for ever
            self._error = error if isinstance(error, RuntimeError) else RuntimeError(repr(error))
        self._let_go()

    def leave_to(self, reaper: SendCompletion) -> None:
        self._reaper = reaper
        reaper.watch(self)

    def _let_go(self) -> None:
        self._tensors, self._works, self._start, self.nbytes = (), (), None, 0
        self._over.set()


class SendCompletion:
    """Waits for the sends on one channel, in the order in which they were started."""

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[Sending | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._reap, name=f"penstock-sends-{name}", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a thread that wakes up while Python ends may abort the process

    def watch(self, sending: Sending) -> None:
        self._queue.put(sending)

    def close(self) -> None:
        atexit.unregister(self.close)
        self._queue.put(None)
        self._thread.join(_LINGERS)  # not for ever: after a failed step a send may never end

    def _reap(self) -> None:
        while (sending := self._queue.get()) is not None:
            sending.wait(FOREVER)
            del sending  # or the last one would live on while this waits for the next


# ---- How a channel is addressed, and messages each by itself.


class P2PGroup(NamedTuple):
    """A channel's way: in `group`, from rank `source` of it to rank `target`, under `tag`."""

    group: dist.ProcessGroup
    source: int
    target: int
    tag: int


class Carrier(Protocol):
    """Sends and receives tensors over lanes; on each lane they pair up in the order in which they are given.

    Raises RuntimeError where a connection is gone.
    """

    def send(self, lane: P2PGroup, tensors: Sequence[Tensor]) -> Sequence[Work]:
        """What to wait for until they are gone."""

    def receive(self, lane: P2PGroup, buffers: Sequence[Tensor]) -> Sequence[Work]:
        """What to wait for until they are here."""

    def start(self, in_line: bool) -> None:
        """Begin what was given since the last call, at the latest. in_line: it may wait until that is over"""


class OneByOne:
    """Each tensor is on its way as soon as it is given."""

    def send(self, lane: P2PGroup, tensors: Sequence[Tensor]) -> list[Work]:
        return [lane.group.send([tensor], lane.target, lane.tag) for tensor in tensors]

    def receive(self, lane: P2PGroup, buffers: Sequence[Tensor]) -> list[Work]:
        return [lane.group.recv([buffer], lane.source, lane.tag) for buffer in buffers]

    def start(self, in_line: bool) -> None:
        """Nothing to do: all have begun."""
