"""Who waits at examples/server_front.py: connections, by address, and requests, in the order of arrival.

Connections    how many are open, and until when each must have sent its headers or its body
Requests       the queue; a request whose client has left is dropped before it costs a step
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from queue import Full
from typing import Any, NamedTuple


class Connections:
    """The open connections: at most `most`, and at most `of_address` from one address."""

    def __init__(self, most: int, of_address: int) -> None:
        self._most, self._of_address = most, of_address
        self._changed = threading.Condition()
        self._open: dict[socket.socket, str] = {}
        self._until: dict[socket.socket, float] = {}

    def admit(self, connection: socket.socket, address: str) -> bool:
        """Count a connection in, unless there are too many."""
        with self._changed:
            of_address = sum(other == address for other in self._open.values())
            if len(self._open) >= self._most or of_address >= self._of_address:
                return False
            self._open[connection] = address
        return True

    def end(self, connection: socket.socket) -> None:
        with self._changed:
            del self._open[connection]
            self._until.pop(connection, None)
            self._changed.notify_all()

    def expect(self, connection: socket.socket, seconds: float | None) -> None:
        """Give a connection so long to send the next part of its request; None: it has sent all."""
        with self._changed:
            self._until[connection] = float("inf") if seconds is None else time.monotonic() + seconds

    def cut_late(self) -> None:
        """End the requests of connections that are late: whoever reads one reads its end."""
        now = time.monotonic()
        with self._changed:
            late = [connection for connection, until in self._until.items() if now > until]
        for connection in late:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RD)

    def wait_for_end(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._open, seconds)


class Job(NamedTuple):
    """A request in the queue, the connection of its client, and the future of its answer."""

    call: str
    arguments: dict[str, Any]
    connection: socket.socket
    answer: Future[dict[str, Any]]

    @property
    def left(self) -> bool:
        """Whether the client has closed its connection, or the half of it that it sends on."""
        poll = select.poll()
        poll.register(self.connection, getattr(select, "POLLRDHUP", 0))  # ends and errors come unasked
        return bool(poll.poll(0))


class Requests:
    """A queue of at most `most` jobs. ended: whether it takes no more"""

    def __init__(self, most: int) -> None:
        self._most, self.ended = most, False
        self._changed = threading.Condition()
        self._jobs = deque[Job]()

    def __len__(self) -> int:
        return len(self._jobs)

    def put(self, job: Job) -> None:
        """Raises queue.Full; cancels the job's answer after `end`."""
        with self._changed:
            if len(self._jobs) >= self._most:
                raise Full
            if self.ended:
                job.answer.cancel()
            else:
                self._jobs.append(job)
            self._changed.notify_all()

    def take(self, seconds: float) -> Job | None:
        """The first job whose client is there, or None after that time without one."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs, seconds)
            self.drop_left()
            return self._jobs.popleft() if self._jobs else None

    def drop_left(self) -> None:
        """Cancel the jobs whose clients have left."""
        with self._changed:
            left = {id(job) for job in self._jobs if job.left}
            for job in self._jobs:
                if id(job) in left:
                    job.answer.cancel()
            self._jobs = deque(job for job in self._jobs if id(job) not in left)

    def end(self) -> list[Job]:
        """Take no further jobs. Returns those that wait."""
        with self._changed:
            self.ended, waiting = True, [*self._jobs]
            self._jobs.clear()
        return waiting
