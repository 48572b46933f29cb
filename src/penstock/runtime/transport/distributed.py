"""One rank a process: agreement, exchange and sums between ranks over torch.distributed (gloo or NCCL)."""

from __future__ import annotations

import copy
import datetime
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from penstock.batch.payload import EdgeSpecs, Payload
from penstock.errors import BatchError
from penstock.runtime.health.progress import Progress
from penstock.runtime.health.watch import Watch
from penstock.runtime.plan import Action, Message, channels
from penstock.runtime.transport.channels import Channels
from penstock.runtime.transport.emulated import Network
from penstock.runtime.transport.groups import GroupProcesses, Groups, Processes, all_gather, gather
from penstock.runtime.transport.interface import add_up, spread
from penstock.schedule import Op, Schedule


class DistributedTransport:
    """The transport of one rank on the `pp` axis of a mesh. It has no channels before `open`."""

    overlap = False
    needless: frozenset[type[Action]] = frozenset()

    def __init__(self, groups: Groups, device: torch.device, timeout: float) -> None:
        self.rank = groups.rank
        self._groups, self._limit = groups, groups.limit
        self._device, self._at = device, groups.control_device(device)
        self._channels: Channels | None = None
        self.closers: list[Callable[[], None]] = []
        self._sharing: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._agreement: tuple[dist.Work, list[Tensor], str] | None = None
        notes = PrefixStore(f"penstock-watch/{self._token()}", _store())
        self.watch = Watch(notes, self.rank, groups.size, timeout)

    def _token(self) -> int:
        """A number that sets this pipeline's notes apart from those of others in the same job."""
        drawn = torch.tensor([secrets.randbits(60)], device=self._at)
        work, everyone = self._all_gather(drawn)
        work.wait(self._limit)
        return int(everyone[0])

    def beside(self, mesh: int) -> None:
        """From now on tell of failures in all pipelines of a mesh. mesh: a number that its processes share"""
        self.watch.beside(PrefixStore(f"penstock-mesh/{mesh}", _store()), dist.get_rank())

    def open(
        self, schedule: Schedule, wire: torch.dtype | None, *, batched: bool, network: Network | None
    ) -> None:
        """Make the channels of a schedule, which is the same on all ranks. Collective."""
        self._channels = Channels(
            self._groups,
            channels(schedule),
            schedule.placement.rank_of,
            self._device,
            wire,
            self.watch,
            batched=batched,
            network=network,
        )

    @property
    def _opened(self) -> Channels:
        assert self._channels is not None, "open() comes first"
        return self._channels

    def post(self, message: Message, specs: EdgeSpecs | None) -> None:
        if self._agreement is not None:  # before anything is posted: a refused batch leaves nothing behind
            self.settle()
        self._opened.post(message, specs)

    def broke_off(self, op: Op | str, cause: RuntimeError) -> Exception:
        if not isinstance(cause, dist.DistError) and not _OF_GLOO.search(str(cause)):
            return cause
        self.watch.begin(f"what {op} exchanges", None)
        try:
            return self.watch.error(cause)
        finally:
            self.watch.end()

    def arrived(self, message: Message) -> bool:
        return True  # it is waited for

    def receive(self, message: Message) -> Payload:
        return self._opened.receive(message)

    def send(self, message: Message, payload: Payload, told: bool) -> None:
        if self._agreement is not None:
            self.settle()
        self._opened.send(message, payload, told)

    def start(self, in_line: bool) -> None:
        self._opened.start(in_line)

    def free(self, message: Message) -> None:
        self._opened.free(message)

    @property
    def buffer_bytes(self) -> int:
        return self._opened.buffer_bytes

    def agree(self, fingerprint: int, description: str) -> None:
        """Started here and read before the first message goes out or is waited for: it costs no time."""
        mine = torch.tensor([fingerprint], dtype=torch.int64, device=self._at)
        with self._waiting("the start of the step", None):
            self._agreement = (*self._all_gather(mine), description)

    def settle(self) -> None:
        if self._agreement is None:
            return
        work, everyone, description = self._agreement
        self._agreement = None
        with self._waiting("the start of the step", None):
            work.wait(self._limit)
        if len({int(fingerprint) for fingerprint in everyone}) == 1:
            return
        told = self.gather(description)
        raise BatchError(
            "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(told)),
            "all ranks of a pipeline step on the same batch, split and schedule",
            "Give every rank the same batch, e.g. by drawing it from the same seed and step",
        )

    def exchange(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        if self._agreement is not None:
            self.settle()
        (mine,) = vectors
        with self._waiting("the end of the step", None):
            work, everyone = self._all_gather(mine.to(self._at))
            work.wait(self._limit)
        return everyone

    def _all_gather(self, mine: Tensor) -> tuple[dist.Work, list[Tensor]]:
        return all_gather(mine, self._groups.whole, self._groups.size)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value` (anything that JSON can hold), in order, on every rank."""
        return gather(value, lambda vector: self.exchange([vector]))

    def apart(self) -> GroupProcesses:
        """These ranks over a group of their own, for another thread than the one that steps: a group is no
        two threads' to use. Every process of the job makes it, at the same point.

        By way of host memory whatever the pipeline's own way, so that a GPU's streams know nothing of it.
        """
        groups = copy.copy(self._groups)  # the group it makes is still closed with the others
        groups.backend, groups.limit = "gloo", _SLOW
        return GroupProcesses(groups.new(range(groups.size), "pp apart"), _SLOW, torch.device("cpu"))

    def share(self, ranks: tuple[int, ...]) -> None:
        if len(ranks) > 1 and ranks not in self._sharing:
            self._sharing[ranks] = self._groups.new(ranks, f"pp weight shared by {ranks}")

    def sum_shared(self, ranks: tuple[int, ...], weights: Sequence[Sequence[Tensor]]) -> None:
        for copies in weights:
            add_up(copies)
        if len(ranks) > 1:
            peer = next(r for r in ranks if r != self.rank)
            for bucket in _buckets([copies[0] for copies in weights]):
                with self._waiting("its part of a shared gradient", peer):
                    self._all_reduce(bucket, self._sharing[ranks])
        for copies in weights:
            spread(copies)

    def _all_reduce(self, tensors: list[Tensor], group: dist.ProcessGroup) -> None:
        """One exchange for all of them, which have one dtype."""
        alone = len(tensors) == 1 and tensors[0].is_contiguous()
        together = tensors[0] if alone else torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        work = dist.all_reduce(together, group=group, async_op=True)
        assert work is not None
        work.wait(self._limit)
        parts = () if alone else torch.split(together, [tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=not alone):
            tensor.copy_(part.view_as(tensor))

    @property
    def pending(self) -> int:
        return self._opened.pending

    def reset(self) -> None:
        """A step that failed on one rank cannot be taken up again: buffers may still be written to.

        One that was refused before anything was sent leaves no question behind.
        """
        self._agreement = None

    def follow(self, progress: Callable[[], Progress | None]) -> None:
        """From now on let the other ranks know now and then how far this one is."""
        self.watch.follow(progress)

    def tell_failure(self, reason: str) -> None:
        self.watch.failed(reason)

    def end_step(self) -> None:
        self._opened.end_step()

    def close(self) -> None:
        while self.closers:
            self.closers.pop()()
        self.watch.close()
        if self._channels is not None:
            self._channels.close()
        self._groups.close()

    @property
    def index(self) -> int:
        return self.rank

    @property
    def count(self) -> int:
        return self._groups.size

    @contextmanager
    def _waiting(self, what: Message | str, peer: int | None) -> Iterator[None]:
        self.watch.begin(what, peer)
        try:
            yield
        except RuntimeError as cause:
            raise self.watch.error(cause) from cause
        finally:
            self.watch.end()


def apart(processes: Processes) -> Processes:
    """The same processes, for another thread. Collective over all processes of the job."""
    return processes.apart() if isinstance(processes, DistributedTransport) else processes


# what gloo says where a rank of a collective is gone or late: nothing but the words tells these errors apart
_OF_GLOO = re.compile(r"gloo|connection (closed|reset)|timed out waiting", re.IGNORECASE)
_SLOW = datetime.timedelta(hours=1)  # a disk may be; a rank that dies closes its connections at once
_BUCKET_BYTES = 64 * 2**20  # the most that is copied together to be summed


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours of one dtype, few enough to copy."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in sorted(tensors, key=lambda tensor: str(tensor.dtype)):  # stable: alike on all ranks
        if bucket and (tensor.dtype != bucket[0].dtype or size + tensor.nbytes > _BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket


def _store() -> Store:
    return dist.distributed_c10d._get_default_store()


def clock_offset(transport: DistributedTransport) -> float:
    """What to add to this process's perf_counter to get rank 0's.

    Processes of one machine share that clock; between machines the wall clocks are trusted.
    """
    boot = _boot_id()
    clocks = transport.gather((boot, time.time() - time.perf_counter()))
    first_boot, first = clocks[0]
    return 0.0 if boot == first_boot else float(clocks[transport.rank][1] - first)


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return f"{os.uname().nodename}"
