"""Copies between a GPU and pinned host memory, on streams of their own: the GPU computes meanwhile.

A copy goes on after the call that starts it has returned. Until its `Moment` is over, keep the host memory,
do not write to the source, and do not read the target.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from queue import Empty, Queue
from threading import Thread
from types import TracebackType
from typing import Protocol, Self

import torch
from torch import Tensor

from penstock.errors import RunError
from penstock.runtime.device.stream import CudaMoment, Moment, reach

PIECE = 1 << 24  # bytes that one thread copies, hashes or writes at a time
_MOST_THREADS = 8  # of a process: SHA-256 runs at 1.1 GB/s on a core, and files are read at 7
_PINNED = 8  # pieces


class Copies(Protocol):
    """Copies to and from one device."""

    def down(self, tensors: Sequence[Tensor], hosts: Sequence[Tensor], *, made: bool = False) -> Moment:
        """Copy `tensors` to host memory, once the compute stream has made them.

        made: True where an earlier call has waited for the compute stream; this one does not wait again
        """

    def up(self, hosts: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], Moment]:
        """Copies on the device, for which the compute stream waits."""

    def fill(self, tensor: Tensor, host: Tensor) -> Moment:
        """Copy `host` into `tensor`, which the compute stream may have used before and uses after."""


class CudaCopies:
    """Copies to and from a GPU, with a stream for each direction."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._downs, self._ups = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]

    def down(self, tensors: Sequence[Tensor], hosts: Sequence[Tensor], *, made: bool = False) -> Moment:
        if not made:
            self._downs.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._downs):
            for tensor, host in zip(tensors, hosts, strict=True):
                host.copy_(tensor, non_blocking=True)
                tensor.record_stream(self._downs)  # freed by then, its memory is kept until the copy is over
            return CudaMoment(self._device)

    def up(self, hosts: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], Moment]:
        computing = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._ups):  # memory of this stream: no wait for the compute stream
            copies = tuple([host.to(self._device, non_blocking=True) for host in hosts])
            moment = CudaMoment(self._device)
        computing.wait_stream(self._ups)
        for copy in copies:
            copy.record_stream(computing)
        return copies, moment

    def fill(self, tensor: Tensor, host: Tensor) -> Moment:
        computing = torch.cuda.current_stream(self._device)
        self._ups.wait_stream(computing)
        with torch.cuda.stream(self._ups):
            tensor.copy_(host, non_blocking=True)
            moment = CudaMoment(self._device)
        computing.wait_stream(self._ups)
        return moment


# ---- Activation offloading: the compute stream waits for a copy only where the plan says so


class HostLink(Protocol):
    """Copies between a device and host memory, each direction in order, while the device computes.

    Both begin once the compute stream has reached the call, and return the argument for `wait`. Keep all
    memory until that wait.
    """

    def down(self, tensors: Sequence[Tensor], hosts: Sequence[Tensor]) -> object:
        """Copy `tensors` of the device to host memory."""

    def up(self, hosts: Sequence[Tensor], tensors: Sequence[Tensor]) -> object:
        """Copy host memory into `tensors` of the device."""

    def wait(self, copied: object) -> None:
        """Make the compute stream wait until these copies are over."""


class CudaLink:
    """The link of a GPU, with a stream for each direction.

    The memory of both ends of a copy is the compute stream's, which waits before it may be used again: so it
    takes no part in the allocator's bookkeeping of streams, and a host far ahead frees it on time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._downs, self._ups = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]

    def down(self, tensors: Sequence[Tensor], hosts: Sequence[Tensor]) -> torch.cuda.Event:
        return self._copy(self._downs, tensors, hosts)

    def up(self, hosts: Sequence[Tensor], tensors: Sequence[Tensor]) -> torch.cuda.Event:
        return self._copy(self._ups, hosts, tensors)

    def wait(self, copied: object) -> None:
        assert isinstance(copied, torch.cuda.Event)
        torch.cuda.current_stream(self._device).wait_event(copied)

    def _copy(
        self, stream: torch.cuda.Stream, sources: Sequence[Tensor], targets: Sequence[Tensor]
    ) -> torch.cuda.Event:
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
            return event


class InlineLink:
    """The link of a CPU, whose memory is host memory: copies are over when the call returns."""

    def down(self, tensors: Sequence[Tensor], hosts: Sequence[Tensor]) -> None:
        for tensor, host in zip(tensors, hosts, strict=True):
            host.copy_(tensor)

    def up(self, hosts: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        self.down(hosts, tensors)

    def wait(self, copied: object) -> None:
        pass


def host_link(device: torch.device) -> HostLink:
    return CudaLink(device) if device.type == "cuda" else InlineLink()


def pin(host: Tensor) -> None:
    """Pin host memory that torch has not allocated, such as that of a file, as long as the process lives.

    Where the system refuses, copies are correct but slower.
    """
    torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.nbytes, 0)  # type: ignore[no-untyped-call]


# ---- Threads for pieces of memory


class Workers:
    """Threads that each work on a piece of memory at a time, in calls that release Python's lock.

    At most as many pieces wait as there are threads, which bounds their memory. The context ends once all
    pieces are done. The error of a piece is raised by the next `do`, or at the end.
    """

    def __init__(self) -> None:
        count = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        count = min(max(count, 1), _MOST_THREADS)
        self._queue: Queue[Callable[[], None] | None] = Queue(count)
        self._error: BaseException | None = None
        self._threads: list[Thread] = []
        for _ in range(count):
            thread = Thread(target=self._serve, name="penstock-piece", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # Python is ending, or the process may start no more threads
                break
            self._threads.append(thread)

    def do(self, work: Callable[[], None]) -> None:
        """Have a thread call `work`; without threads call it here."""
        if self._error is not None:
            raise self._error
        if self._threads:
            self._queue.put(work)
        else:
            work()

    def _serve(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work()
            except BaseException as error:
                self._error = error
            del work  # and with it the memory

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:  # drop the pieces that still wait
            with suppress(Empty):
                while True:
                    self._queue.get_nowait()
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()
        if error is None and self._error is not None:
            raise self._error


# ---- Background copies of a device's tensors: it goes on computing, and does not change them


class BackgroundCopies:
    """Copies in host memory, made while the device computes.

        device    | piece 1 to A | piece 2 to B | piece 3 to C ...       on a stream of its own
        threads                  | A to its place | B to its place ...

    A to H are pinned, for the rate of the link. The copies are not: a system pins some 1.3 GB a second, and
    training would wait for that.

    Args:
        copies: None where the device's memory is the host's: a copy is then complete when its call returns
        kept: False makes no copies, and gives empty tensors
    """

    def __init__(self, copies: Copies | None, *, kept: bool = True, pinned: bool = True) -> None:
        self._copies, self._kept, self._pinned = copies, kept, pinned
        self._later: list[tuple[Tensor, Tensor]] = []
        self._done: Future[None] = Future()
        self._dropped = False

    def now(self, tensor: Tensor) -> Tensor:
        """A contiguous copy, complete when the call returns."""
        if not self._kept:
            return torch.empty(0)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        if self._copies is None or _is_on_host(tensor):
            return host.copy_(tensor)
        self._copy(self._copies, [(tensor.contiguous(), host)], made=False)
        return host

    def later(self, tensor: Tensor) -> Tensor:
        """A contiguous copy, complete once `result` returns. Until then nobody may change the tensor."""
        if not self._kept or self._copies is None or _is_on_host(tensor) or not tensor.is_contiguous():
            return self.now(tensor)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        self._later.append((tensor, host))
        return host

    def begin(self) -> None:
        """Begin the copies that `later` has registered, of the values at this point of the compute stream."""
        if self._copies is None or not self._later:
            self._done.set_result(None)
            return
        self._copies.down([], [])  # after what is computed by now
        thread = Thread(target=self._run, args=(self._copies,), name="penstock-copy", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # as of Workers
            self._run(self._copies)

    def wait(self) -> None:
        """Wait until the copied tensors may be changed, even if copying failed."""
        wait([self._done])

    def before_step(self, *_: object) -> None:
        """The same as `wait`, as a pre-hook of an optimizer's step."""
        self.wait()

    def result(self) -> None:
        """Wait until all copies are complete. Raises the error of a copy that failed."""
        self._done.result()

    def drop(self) -> None:
        """Leave the copies incomplete."""
        self._dropped = True

    def _run(self, copies: Copies) -> None:
        try:
            self._copy(copies, self._later, made=True)
        except BaseException as error:  # raised by `result`
            self._done.set_exception(error)
        else:
            self._done.set_result(None)
        finally:
            self._later = []

    def _copy(self, copies: Copies, pairs: Sequence[tuple[Tensor, Tensor]], *, made: bool) -> None:
        free: Queue[Tensor] = Queue()
        count = sum(-(-host.nbytes // PIECE) for _, host in pairs) or 1  # of nothing, too
        size = min(PIECE, max(host.nbytes for _, host in pairs))
        for _ in range(min(count, _PINNED)):
            free.put(torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned))
        with Workers() as workers:
            for pair in pairs:
                source, host = (tensor.reshape(-1).view(torch.uint8) for tensor in pair)
                for part, into in zip(torch.split(source, PIECE), torch.split(host, PIECE), strict=True):
                    if self._dropped:
                        raise RunError(
                            "a checkpoint under way", "it was given up", "Go on from the previous checkpoint"
                        )
                    piece = free.get()
                    moment = copies.down([part], [piece[: len(part)]], made=made)
                    workers.do(partial(_take, moment, piece, into, free))


def _take(moment: Moment, piece: Tensor, into: Tensor, free: Queue[Tensor]) -> None:
    """Put a piece in its place, once it has arrived."""
    try:
        reach(moment)
        ctypes.memmove(into.data_ptr(), piece.data_ptr(), len(into))
    finally:
        free.put(piece)


def _is_on_host(tensor: Tensor) -> bool:
    return tensor.is_cpu


def background_copies(device: torch.device, *, kept: bool = True) -> BackgroundCopies:
    return BackgroundCopies(CudaCopies(device) if device.type == "cuda" else None, kept=kept)
