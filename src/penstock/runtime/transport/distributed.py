"""One rank per process: messages and sums between ranks over torch.distributed (gloo or NCCL)."""

from __future__ import annotations

import os
import secrets
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from penstock.private import (
    flatten_dense_tensors,
    foreach_copy_,
    get_default_store,
    take_tensors,
    unflatten_dense_tensors,
)
from penstock.runtime.health.limits import is_of_peer, within
from penstock.runtime.health.notes import boot_id
from penstock.runtime.health.watch import Watch
from penstock.runtime.plan import channels
from penstock.runtime.ranks import GroupRanks, Ranks
from penstock.runtime.recorder import Progress
from penstock.runtime.shared_memory.messages import SharedMessages
from penstock.runtime.shared_memory.processes import SharedVectors
from penstock.runtime.shared_memory.segment import Segment, open_segments
from penstock.runtime.transport.channels import Channels
from penstock.runtime.transport.groups import Groups
from penstock.runtime.transport.interface import Transport
from penstock.runtime.transport.stream_channels import StreamChannels, Transfer, hold_up_until
from penstock.schedule import Op, Schedule

_BUCKET_BYTES = 64 * 2**20  # the most that is copied together to be summed


class DistributedTransport(Transport):
    """The transport of one rank on the `pp` axis of a mesh.

    It has no messages before `open`.

    Args:
        timeout: seconds that a wait for another rank may take.
        watch: of all processes of the job; None makes one for the processes of this pipeline.
    """

    def __init__(
        self, groups: Groups, device: torch.device, timeout: float, watch: Watch | None = None
    ) -> None:
        super().__init__()
        self.rank = groups.rank
        self._groups, self._limit = groups, groups.limit
        self._device = device
        self._sharing: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._segments: list[Segment] | None = None
        self._spin = False
        if watch is None:  # the job's other processes may not run penstock
            drawn = GroupRanks(groups.host, groups.limit).gather(secrets.token_hex(8))
            watch = watch_of(drawn[0], self.rank, groups.size, timeout)
        else:
            watch.number_ranks(groups.members)
        self.watch = groups.watch = watch
        self.ranks: GroupRanks = GroupRanks(
            groups.host, groups.limit, watch=watch, waits_for="the end of the step", numbered=True,
            another=partial(groups.new_on_host, "pp background"),
        )  # fmt: skip
        self.watch.gives_up = abort = _unless_gone(groups.abort)
        self.watch.frees = abort if groups.backend == "nccl" and groups.size > 1 else None

    def open(self, schedule: Schedule, wire: torch.dtype | None, *, batched: bool) -> None:
        """Make the channels of a schedule, which is the same on all ranks. Collective.

        batched: whether messages go in batches; only over NCCL
        """
        edges, hosts = channels(schedule), schedule.placement.rank_of
        if self._segments is not None:
            # other pipelines of the mesh may need these groups
            self._groups.pass_over("pp gradients", lambda: self.ranks.gather(None))
            self.messages = SharedMessages(
                self.rank, self._segments, edges, hosts, wire, self.watch, self._limit, self._spin
            )
        elif self._groups.backend == "nccl":
            self.messages = StreamChannels(
                self._groups, edges, hosts, self._device, wire, self.watch, batched=batched
            )
        else:
            self.messages = Channels(self._groups, edges, hosts, self._device, wire, self.watch)
        self.closers.append(self.messages.close)

    def share_memory(self) -> None:
        """From now on, communicate through shared memory, if all ranks are on this host. Collective."""
        self._segments = open_segments(self.ranks)
        if self._segments is None:
            return
        self.closers += [segment.close for segment in self._segments]
        # ends the waits of other ranks, as a broken connection would; they then read this rank's notes
        self.watch.gives_up = _unless_gone(self._segments[self.rank].end)
        # a rank that polls for a message occupies its core
        self._spin = len(os.sched_getaffinity(0)) >= dist.get_world_size()
        self.ranks.shared = SharedVectors(self.rank, self._segments, self._spin).start

    def share(self, ranks: tuple[int, ...]) -> None:
        if len(ranks) > 1 and ranks not in self._sharing:
            self._sharing[ranks] = self._groups.new(ranks, f"pp weight shared by {ranks}")

    def _sum_first(self, tensors: Sequence[Tensor], ranks: tuple[int, ...]) -> None:
        if len(ranks) == 1:
            return
        peer, awaited = next(rank for rank in ranks if rank != self.rank), "its part of a shared gradient"
        on_stream, works = self._groups.backend == "nccl", list[dist.Work]()
        for bucket in take_tensors(tensors, _BUCKET_BYTES):  # type: ignore[no-untyped-call]  # same on all ranks
            joined = flatten_dense_tensors(bucket)  # type: ignore[no-untyped-call]  # no copy of a single one
            with self.watch.waiting(awaited, peer):
                work = dist.all_reduce(joined, group=self._sharing[ranks], async_op=True)
                assert work is not None
                # with a limit, NCCL would block the host in every bucket
                work.wait() if on_stream else work.wait(self._limit)
            works.append(work)
            sums = unflatten_dense_tensors(joined, bucket)  # type: ignore[no-untyped-call]
            foreach_copy_(bucket, list(sums))
        if on_stream:  # once for all buckets, before an optimizer uses the gradients
            hold_up_until(Transfer(awaited, peer, works).over, awaited, peer, self.watch, self._limit)

    def broke_off(self, doing: Op | str, cause: RuntimeError) -> Exception:
        if not is_of_peer(cause):
            return cause
        error = self.watch.error(cause, f"what {doing} exchanges")
        self.watch.end()
        return error

    def follow(self, progress: Callable[[], Progress | None]) -> None:
        self.watch.follow(progress)

    def name_of(self, rank: int) -> str:
        return self.watch.name_of(rank)

    def reset(self) -> None:
        """A step that failed on one rank cannot be resumed: buffers may still be written to.

        One that was refused before anything was sent leaves no open comparison.
        """
        self.ranks.begun = None

    def close(self) -> None:
        super().close()
        self.watch.close()
        self._groups.close()


def _unless_gone(method: Callable[[], None]) -> Callable[[], None]:
    """A bound method that does not keep its object: the watch outlives a dropped pipeline."""
    reference = weakref.WeakMethod(method)
    return lambda: None if (alive := reference()) is None else alive()


def watch_of(name: str, process: int, processes: int, timeout: float) -> Watch:
    """A watch whose notes are in the job's store under `name`."""
    return Watch(PrefixStore(f"penstock-watch/{name}", get_default_store()), process, processes, timeout)


def times_built(timeout: float) -> int:
    """How often this process has built a pipeline of all processes: the same number on all of them.

    Raises RuntimeError where the store does not answer in time.
    """
    store, process = get_default_store(), dist.get_rank()
    return within(
        timeout, "the store does not answer", lambda: int(store.add(f"penstock-built/{process}", 1))
    )


def clock_offset(ranks: Ranks) -> float:
    """Seconds to add to this process's perf_counter to get rank 0's. Collective.

    Processes of one machine share that clock; between machines the wall clocks are trusted.
    """
    boot = boot_id()
    clocks = ranks.gather((boot, time.time() - time.perf_counter()))
    first_boot, first = clocks[0]
    return 0.0 if boot == first_boot else float(clocks[ranks.index][1] - first)
