"""In-memory checkpoints: every few steps each rank's state goes to its host's memory, and to another host's.

    step 7       | step 8: forwards and backwards               | clip | optimizer | step 9 ...
    optimizer    | thread: copies weights and moments, commits  |      | changes them
                 |         sends the shard to a rank of the next host, and commits the one it receives

Only an optimizer changes weights and moments, so they are copied while the next step computes. `settle`
waits for the copies before the last collective of the step: once a rank has ended step 8, every rank has
committed step 7. Each rank keeps two shards, so a kill at any moment leaves a step of which all have a shard.

A process that is lost leaves its shards in its host's memory. A host that is lost has copies on the next one.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.optim import Optimizer

from penstock.checkpoint.live_state import Holdings, LiveState, check_finite, check_identity
from penstock.checkpoint.neighbours import Neighbours
from penstock.checkpoint.shards import (
    HeldShard,
    HostMemory,
    Mark,
    ShardFiles,
    is_whole,
    laid_out,
    shards_in,
    views,
)
from penstock.errors import CheckpointError
from penstock.models.weights.folder import UNREADABLE
from penstock.pipeline.pipeline import Pipeline
from penstock.private import foreach_copy_
from penstock.runtime.device import stream
from penstock.runtime.device.copies import CudaCopies, pin
from penstock.runtime.device.stream import Time
from penstock.runtime.transport.checksums import checksum

_LINGERS = 2.0  # seconds for the thread to end after an error

State = dict[str, Any]
TensorCopy = tuple[Tensor, Tensor]  # from, to


class Recalled(NamedTuple):
    """The result of a recall. state: the loop's, or None. passed: a line for each checkpoint not loaded"""

    state: State | None
    passed: list[str]


@dataclass
class _Job:
    """A shard that a thread completes, and the contents of its description.

    after: what the thread waits for before it commits the shard
    copied: done when weights may change; exchanged: done when the neighbours have the shard too
    """

    mark: Mark
    name: str
    data: Tensor
    live: LiveState
    table: list[Any]
    state: Callable[[], State]
    after: Future[None] | None
    copied: Future[None] = field(default_factory=Future)
    exchanged: Future[None] = field(default_factory=Future)


class MemoryCheckpoints:
    """The in-memory checkpoints of a run. Every process of the job makes one, together.

    Args:
        run: the identity of the run; that of process 0 counts
        output: its output folder
        timeout: seconds that a rank waits for another

    Raises ConfigError if a host has no such memory; RunError on the other processes, and if a process of an
    earlier attempt lives, which could write there.
    """

    def __init__(
        self, pipe: Pipeline, optimizers: Sequence[Optimizer], run: str | None, output: Path, timeout: float
    ) -> None:
        self._everyone, self._holdings = pipe.ranks, Holdings(pipe, optimizers)
        self._rank, self._world = self._everyone.index, self._everyone.count
        self.run, self._attempt = self._everyone.gather([run, secrets.token_hex(4)])[0]
        self._slots: dict[int, ShardFiles] = {}

        def opened() -> str:
            self._memory = HostMemory(self.run, output)
            self._slots[self._rank] = ShardFiles(self._memory, self._rank, self._world)
            return self._memory.name

        name = self._everyone.attempt("keep checkpoints in memory", opened)
        self._hosts: list[str] = self._everyone.gather(name)
        self._neighbours = Neighbours(pipe, self._hosts, timeout)
        self._identity = self._holdings.identity(self._world)
        self._copies = CudaCopies(pipe.device) if pipe.device.type == "cuda" else None
        self._laid_out: dict[str, tuple[Tensor, list[Any], dict[str, Tensor]]] = {}  # by a shard's name
        self._pinned: list[Tensor] = []
        self._job: _Job | None = None
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        # one thread for all saves: the start of a thread waits until it runs
        self._thread = threading.Thread(
            target=_serve, args=(self._jobs,), name="penstock-memory", daemon=True
        )
        self._thread.start()

    @property
    def folder(self) -> Path:
        """Where this host keeps the checkpoints."""
        return self._memory.folder

    # ---- save

    def save(self, step: int, state: Callable[[], State], after: Future[None] | None = None) -> None:
        """Begin to keep the state after `step`; `settle` ends it.

        Args:
            state: returns the loop's state, in JSON; called in another thread
            after: the shard is complete only once this is done

        Raises ConfigError if the memory is too small; CheckpointError for state that cannot be kept.
        """
        assert self._job is None, "settle comes before save"
        live = self._holdings.now()
        tensors = {**live.steady, **live.passing}
        table, size = laid_out(tensors)
        name, data = self._slots[self._rank].begin(size)
        hosts = self._hosts_of(name, data, table)
        for passing, tensor in live.passing.items():
            hosts[passing].copy_(tensor)
        copies = [(tensor, hosts[key]) for key, tensor in live.steady.items()]
        on_host = [copy for copy in copies if copy[0].is_cpu]
        self._job = job = _Job(Mark(step, self._attempt), name, data, live, table, state, after)
        self._jobs.put(partial(self._keep, job, on_host, self._begin_copies(copies)))

    def _begin_copies(self, copies: Sequence[TensorCopy]) -> Time:
        """Begin to copy the tensors on a GPU while it computes. Returns the time when all are copied."""
        if self._copies is None:
            return 0.0
        on_device = [copy for copy in copies if not copy[0].is_cpu]
        return self._copies.down([tensor for tensor, _ in on_device], [host for _, host in on_device])

    def _hosts_of(self, name: str, data: Tensor, table: list[Any]) -> dict[str, Tensor]:
        """The tensors in the bytes of a shard, by name; made once for each file and table."""
        known = self._laid_out.get(name)
        if known is None or known[0].data_ptr() != data.data_ptr() or known[1] != table:
            if self._copies is not None:
                pin(data)
                self._pinned.append(data)  # else the system would unmap it first
            self._laid_out[name] = known = data, table, dict(views(data, table))
        return known[2]

    def settle(self, *, exchanged: bool) -> None:
        """Wait until weights may change. exchanged: also until the neighbour has its copy, before a `save`

        Raises PeerError if a neighbour is gone or late.
        """
        if (job := self._job) is None:
            return
        job.copied.result()
        if exchanged:
            with self._neighbours.waiting():
                job.exchanged.result()
            self._job = None

    # ---- recall

    def recall(self, after: int) -> Recalled:
        """Restore the newest state of which memory has every rank's shard; remove all others. Collective.

        after: only states of later steps
        """
        shards = {(shard.mark, shard.rank): shard for shard in shards_in(self.folder)}
        holders = self._holders(shards)
        damaged, lost = (
            list[str](),
            [
                f"step {mark.step} in memory: it is of {shard.world} processes, not of {self._world}"
                for (mark, rank), shard in shards.items()
                if shard.world != self._world and rank == 0
            ],
        )
        for mark in sorted((mark for mark in holders if mark.step > after), reverse=True):
            if not is_whole(holders[mark], self._world):
                rank = min(set(range(self._world)) - holders[mark].keys())
                lost.append(f"step {mark.step} in memory: the shard of rank {rank} is lost")
                continue
            shard = self._fetched(mark, holders[mark], shards)
            problems = self._everyone.gather(self._problem(shard))
            if odd := next(filter(None, problems), None):
                damaged.append(f"step {mark.step} in memory: {odd}")
                continue
            assert shard is not None
            return Recalled(self._put_back(shard), damaged)
        self.forget()
        return Recalled(None, damaged + lost)

    def _holders(self, shards: Mapping[tuple[Mark, int], HeldShard]) -> dict[Mark, dict[int, list[int]]]:
        """The processes on whose hosts a shard is, by its mark and rank. Collective. shards: of this host"""
        mine = [[*mark, rank] for (mark, rank), shard in shards.items() if shard.world == self._world]
        holders: dict[Mark, dict[int, list[int]]] = {}
        for process, offered in enumerate(self._everyone.gather(mine)):
            for step, attempt, rank in offered:
                holders.setdefault(Mark(step, attempt), {}).setdefault(rank, []).append(process)
        return holders

    def forget(self, kept: Mark | None = None) -> None:
        """Remove all shards of this run but those of `kept`. Collective."""
        self._memory.forget(kept)
        self._everyone.gather(None)  # no rank writes a new shard before all have removed theirs

    def go_back(self) -> None:
        """Remove all shards, as the run goes on from an older state: its steps come again. Collective."""
        self.settle(exchanged=True)
        self._attempt = self._everyone.gather(secrets.token_hex(4))[0]
        self.forget()

    def _fetched(
        self, mark: Mark, holders: dict[int, list[int]], shards: dict[tuple[Mark, int], HeldShard]
    ) -> HeldShard | None:
        """This rank's shard, which may come from another host; None if it is gone by now."""
        sources = {rank: rank if rank in processes else processes[0] for rank, processes in holders.items()}
        under_way = []
        with self._neighbours.waiting():
            for rank, source in sorted(sources.items()):
                if source == self._rank != rank:
                    sent = shards[mark, rank]
                    about = {"mark": mark, "content": sent.content, "checksum": sent.checksum}
                    under_way += self._neighbours.send(rank, about, sent.mapped())
            if sources[self._rank] != self._rank:
                self._receive(sources[self._rank], self._rank)
            self._neighbours.finish(under_way)
        if sources[self._rank] == self._rank:
            return shards[mark, self._rank]
        own = (shard for shard in shards_in(self.folder) if (shard.mark, shard.rank) == (mark, self._rank))
        return next(own, None)

    def _problem(self, shard: HeldShard | None) -> str | None:
        """Why this rank cannot go on from `shard`; None if it can."""
        try:
            if shard is None:
                return f"the shard of rank {self._rank} is gone"
            check_identity(shard.content["identity"], self._identity)
            tensors = dict(views(shard.read(), shard.content["table"]))
            check_finite(tensors, shard.content["passing"])
        except CheckpointError as error:
            return f"rank {self._rank}: {error}"
        except (*UNREADABLE, RuntimeError) as error:
            return f"rank {self._rank}: it cannot be read ({type(error).__name__}: {error})"
        return None

    def _put_back(self, shard: HeldShard) -> State:
        content = shard.content
        tensors = dict(views(shard.read(), content["table"]))
        self._holdings.put_back(tensors, content["numbers"])
        self.forget(shard.mark)
        return dict(content["state"])

    # ---- the thread

    @torch.no_grad()
    def _keep(self, job: _Job, copies: Sequence[TensorCopy], moment: Time) -> None:
        """Copy the steady tensors, commit the shard, and exchange it with the neighbours."""
        try:
            if copies:
                foreach_copy_([host for _, host in copies], [tensor for tensor, _ in copies])
            stream.reach(moment)
            if job.after is not None:
                wait([job.after])  # its error is raised where its result is read
            content = {
                "identity": self._identity, "table": job.table, "passing": list(job.live.passing),
                "numbers": job.live.numbers, "state": job.state(),
            }  # fmt: skip
            word_sum = checksum(job.data)
            self._slots[self._rank].commit(job.name, job.mark, content, word_sum)
            job.copied.set_result(None)
            self._exchange(job, content, word_sum)
            job.exchanged.set_result(None)
        except BaseException as error:  # raised by `settle`
            for future in (job.copied, job.exchanged):
                if not future.done():
                    future.set_exception(error)

    def _exchange(self, job: _Job, content: Mapping[str, Any], word_sum: int) -> None:
        """Send this rank's shard to its keeper, and keep the shards of its wards."""
        if (keeper := self._neighbours.keeper) is None:
            return
        about = {"mark": job.mark, "content": content, "checksum": word_sum}
        under_way = self._neighbours.send(keeper, about, job.data)
        for ward in self._neighbours.wards:
            self._receive(ward, ward)
        self._neighbours.finish(under_way)

    def _receive(self, source: int, rank: int) -> None:
        """Receive a shard of `rank` from process `source`, and keep it on this host."""
        if rank not in self._slots:
            self._slots[rank] = ShardFiles(self._memory, rank, self._world)
        names: list[str] = []

        def allocate(size: int) -> Tensor:
            name, data = self._slots[rank].begin(size)
            names.append(name)
            return data

        about = self._neighbours.receive(source, allocate)
        mark = Mark(*about["mark"])
        self._slots[rank].commit(names[0], mark, about["content"], about["checksum"])

    # ---- the end

    def remove(self) -> None:
        """Free the memory: the run has ended by itself. Not collective."""
        self._memory.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.settle(exchanged=True)
        self.close()

    def close(self) -> None:
        """End the thread, and close the memory, which keeps its shards."""
        self._jobs.put(None)
        self._thread.join(_LINGERS)
        if self._thread.is_alive():
            return  # it waits for a rank that is gone
        self._neighbours.close()
        for slots in self._slots.values():
            slots.close()
        self._memory.close()


def _serve(jobs: SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
