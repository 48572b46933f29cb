"""One rank a process: channels, agreement and sums over torch.distributed (gloo or NCCL).

What pairs up on a channel depends on nothing else. On NCCL each channel has a process group of its own. On
gloo each has a tag of its own, in one group for activations and one for gradients: with a single group for
both, steps of small ops took half as long again, and each further group keeps a thread that wakes a hundred
times a second in the middle of what the rank computes.
"""

from __future__ import annotations

import datetime
import json
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh

from penstock.errors import BatchError, RunError
from penstock.runtime.lower import Channel, Message
from penstock.runtime.mesh import pipelines
from penstock.runtime.shapes import EdgeSpecs
from penstock.runtime.transport import add_up, spread
from penstock.runtime.watch import Watch
from penstock.schedule import Placement


class Lane(NamedTuple):
    """How a channel is addressed: in `group`, from rank `source` of it to rank `target`, under `tag`."""

    group: dist.ProcessGroup
    source: int
    target: int
    tag: int


class InFlight(NamedTuple):
    works: list[dist.Work]
    tensors: tuple[Tensor, ...]


class DistributedTransport:
    """The transport of one rank on the `pp` axis of `mesh`."""

    def __init__(self, mesh: DeviceMesh, placement: Placement, channels: Sequence[Channel],
                 device: torch.device, timeout: float) -> None:  # fmt: skip
        pipeline = mesh["pp"]
        self.rank = pipeline.get_local_rank()
        self._group = pipeline.get_group()
        self._members = dist.get_process_group_ranks(self._group)
        self._pipelines = pipelines(mesh)
        self._hosts = placement.rank_of
        self._device = device
        self._limit = datetime.timedelta(seconds=timeout)
        self._channels = self._open(channels)
        self._sharing: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._posted: dict[Message, InFlight] = {}
        self._sending: dict[Message, InFlight] = {}
        self._agreement: tuple[dist.Work, list[Tensor], str] | None = None
        notes = PrefixStore(f"penstock-watch/{self._token()}", _store())
        self.watch = Watch(notes, self.rank, placement.ranks, timeout)

    def _token(self) -> int:
        """A number that sets this pipeline's notes apart from those of others in the same job."""
        drawn = torch.tensor([secrets.randbits(60)], device=self._device)
        work, everyone = self._all_gather(drawn)
        work.wait(self._limit)
        return int(everyone[0])

    def _open(self, channels: Sequence[Channel]) -> dict[Channel, Lane]:
        lanes: dict[Channel, Lane] = {}
        if has_tags(self._group):
            gradients = self._new_group(range(len(self._members)), "pp gradients")
            for tag, channel in enumerate(channels, start=1):
                group = self._group if channel.source < channel.target else gradients
                lanes[channel] = Lane(group, self._hosts[channel.source], self._hosts[channel.target], tag)
            return lanes
        for channel in channels:
            source, target = self._hosts[channel.source], self._hosts[channel.target]
            group = self._new_group((source, target), f"pp channel {channel.source} to {channel.target}")
            lanes[channel] = Lane(group, int(source > target), int(target > source), 0)
        return lanes

    def _new_group(self, ranks: Sequence[int], name: str) -> dist.ProcessGroup:
        """A group of these ranks in each pipeline of the mesh; returns the one of this pipeline.

        Every process of the world makes all of them in one order: torch names a group by how many there
        are, so that groups made by their members alone miss each other.
        """
        own: dist.ProcessGroup | None = None
        for members in self._pipelines:
            group: dist.ProcessGroup = dist.new_group(
                sorted(members[r] for r in ranks), timeout=self._limit, group_desc=name
            )
            own = group if members == self._members else own
        assert own is not None
        return own

    def post(self, message: Message, specs: EdgeSpecs) -> None:
        if self._agreement is not None:  # before anything is posted: a refused batch leaves nothing behind
            self._settle()
        group, source, _, tag = self._channels[message.channel]
        buffers = tuple([torch.empty(spec.shape, dtype=spec.dtype, device=self._device) for spec in specs])
        try:
            works = [group.recv([buffer], source, tag) for buffer in buffers]
        except RuntimeError as cause:
            raise self._broken(cause, message, self._hosts[message.op.stage]) from cause
        self._posted[message] = InFlight(works, buffers)

    def receive(self, message: Message) -> tuple[Tensor, ...]:
        works, buffers = self._posted.pop(message)
        self._finish(works, message, self._hosts[message.op.stage])
        return buffers

    def send(self, message: Message, tensors: tuple[Tensor, ...]) -> None:
        if self._agreement is not None:
            self._settle()
        group, _, target, tag = self._channels[message.channel]
        tensors = tuple([tensor.contiguous() for tensor in tensors])
        try:
            works = [group.send([tensor], target, tag) for tensor in tensors]
        except RuntimeError as cause:
            raise self._broken(cause, message, self._hosts[message.target]) from cause
        self._sending[message] = InFlight(works, tensors)

    def free(self, message: Message) -> None:
        self._finish(self._sending.pop(message).works, message, self._hosts[message.target])

    def _finish(self, works: list[dist.Work], message: Message, peer: int) -> None:
        """Wait for `works`, which move `message` from or to `peer`."""
        self.watch.begin(message, peer)
        try:
            for work in works:
                work.wait(self._limit)
        except RuntimeError as cause:
            raise self._broken(cause, message, peer) from cause
        self.watch.end()

    def _broken(self, cause: RuntimeError, message: Message, peer: int) -> RunError:
        self.watch.begin(message, peer)
        return self.watch.error(cause)

    def agree(self, fingerprint: int, description: str) -> None:
        """Started here and read before the first message goes out or is waited for: it costs no time."""
        mine = torch.tensor([fingerprint], dtype=torch.int64, device=self._device)
        with self._waiting("the start of the step", None):
            self._agreement = (*self._all_gather(mine), description)

    def _settle(self) -> None:
        assert self._agreement is not None
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
            self._settle()
        (mine,) = vectors
        with self._waiting("the end of the step", None):
            work, everyone = self._all_gather(mine.to(self._device))
            work.wait(self._limit)
        return everyone

    def _all_gather(self, mine: Tensor) -> tuple[dist.Work, list[Tensor]]:
        everyone = list(mine.new_empty((len(self._members), *mine.shape)).unbind())
        work = dist.all_gather(everyone, mine, self._group, async_op=True)
        assert work is not None
        return work, everyone

    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value` (anything that JSON can hold), in order, on every rank."""
        text = json.dumps(value).encode()
        length = torch.tensor([len(text)], dtype=torch.float64)
        longest = int(max(size.item() for size in self.exchange([length])))
        padded = torch.zeros(longest, dtype=torch.float64)
        padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        received = self.exchange([padded])
        return [json.loads(bytes(t.to(torch.uint8).tolist()).rstrip(b"\0")) for t in received]

    def share(self, ranks: tuple[int, ...]) -> None:
        if len(ranks) > 1 and ranks not in self._sharing:
            self._sharing[ranks] = self._new_group(ranks, f"pp weight shared by {ranks}")

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
        return len(self._posted) + len(self._sending)

    def reset(self) -> None:
        """A step that failed on one rank cannot be taken up again: buffers may still be written to."""

    def tell_failure(self, reason: str) -> None:
        self.watch.failed(reason)

    def close(self) -> None:
        self.watch.close()
        groups = {lane.group for lane in self._channels.values()} | set(self._sharing.values())
        for group in groups - {self._group}:
            if isinstance(group, dist.ProcessGroup):  # else one that this rank is no member of
                dist.destroy_process_group(group)

    @property
    def index(self) -> int:
        return self.rank

    @property
    def count(self) -> int:
        return len(self._members)

    @contextmanager
    def _waiting(self, what: str, peer: int | None) -> Iterator[None]:
        self.watch.begin(what, peer)
        try:
            yield
        except RuntimeError as cause:
            raise self.watch.error(cause) from cause
        finally:
            self.watch.end()


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


def has_tags(group: dist.ProcessGroup) -> bool:
    """Whether messages between the same two ranks of `group` can be told apart."""
    return dist.get_backend(group) == "gloo"


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
