"""The processes of a group, for what they tell each other beside the steps."""

from __future__ import annotations

import datetime
import json
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from penstock.errors import PeerLostError, StalledPeerError

# ---- The processes that one pipeline runs in: one a rank, or a single one that holds all ranks.


class Processes(Protocol):
    """What code above the executor needs of the other processes."""

    @property
    def index(self) -> int:
        """This process, from 0. Process 0 writes what is written once."""

    @property
    def count(self) -> int: ...

    def gather(self, value: Any) -> list[Any]:
        """Every process's value (JSON must hold it), in order, on every process. All must call it."""


class OneProcess:
    """All ranks live in this process."""

    index = 0
    count = 1

    def gather(self, value: Any) -> list[Any]:
        return [value]


# Of the latest collectives. A thread of gloo lets go of them a moment after it has said that they are over.
# If it were the last to do so it would need Python, which may be ending by then: that aborts the process.
_LATEST: deque[tuple[Tensor, list[Tensor]]] = deque(maxlen=16)


class GroupProcesses:
    """Of `group`; each wait for the others takes `limit` at most. device: where the group's tensors are"""

    def __init__(self, group: dist.ProcessGroup, limit: datetime.timedelta, device: torch.device) -> None:
        self._group, self._limit, self._device = group, limit, device
        self.index, self.count = dist.get_rank(group), dist.get_world_size(group)

    def gather(self, value: Any) -> list[Any]:
        return gather(value, self._exchange)

    def _exchange(self, mine: Tensor) -> list[Tensor]:
        work, everyone = all_gather(mine.to(self._device), self._group, self.count)
        work.wait(self._limit)
        return everyone


class AllProcesses(GroupProcesses):
    """All processes of the job, before there is any mesh, and so no watch that could name who is late."""

    def __init__(self, timeout: float, device: torch.device) -> None:
        group = dist.group.WORLD
        assert group is not None
        where = device if dist.get_backend(group) == "nccl" else torch.device("cpu")
        super().__init__(group, datetime.timedelta(seconds=timeout), where)

    def gather(self, value: Any) -> list[Any]:
        """Raises StalledPeerError, PeerLostError."""
        try:
            return super().gather(value)
        except RuntimeError as cause:
            late = "timed out" in str(cause).lower()
            kind = StalledPeerError if late else PeerLostError
            seconds = self._limit.total_seconds()
            raise kind(
                f"process {self.index} waiting for the handshake of all {self.count}",
                f"some of them did not come within {seconds:.0f} s" if late else "some of them are gone",
                "Let every process of the job build the pipeline, and see what the others failed at",
            ) from cause


def gather(value: Any, exchange: Callable[[Tensor], list[Tensor]]) -> list[Any]:
    """Everyone's `value`, by way of an exchange of float64 vectors of one length."""
    text = json.dumps(value).encode()
    length = torch.tensor([len(text)], dtype=torch.float64)
    longest = int(max(size.item() for size in exchange(length)))
    padded = torch.zeros(longest, dtype=torch.float64)
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    received = exchange(padded)
    return [json.loads(bytes(t.to(torch.uint8).tolist()).rstrip(b"\0")) for t in received]


def all_gather(mine: Tensor, group: dist.ProcessGroup, count: int) -> tuple[dist.Work, list[Tensor]]:
    """Started, of tensors where the group wants them."""
    everyone = list(mine.new_empty((count, *mine.shape)).unbind())
    work = dist.all_gather(everyone, mine, group, async_op=True)
    assert work is not None
    _LATEST.append((mine, everyone))
    return work, everyone


# ---- The process groups of one pipeline.


class Groups:
    """Makes process groups among the ranks on the `pp` axis of `mesh`.

    backend: "gloo" or "nccl"; None takes that of the mesh
    """

    def __init__(self, mesh: DeviceMesh, timeout: float, backend: str | None = None) -> None:
        pipeline = mesh["pp"]
        group = pipeline.get_group()
        self.rank = pipeline.get_local_rank()
        self.limit = datetime.timedelta(seconds=timeout)
        self.backend = backend or dist.get_backend(group)
        self._members = dist.get_process_group_ranks(group)
        self._pipelines = pipelines(mesh)
        self._made: list[dist.ProcessGroup] = []
        fits = dist.get_backend(group) == self.backend
        self.whole = group if fits else self.new(range(len(self._members)), "pp")

    @property
    def size(self) -> int:
        return len(self._members)

    def new(self, ranks: Sequence[int], name: str) -> dist.ProcessGroup:
        """A group of these ranks in each pipeline of the mesh; returns the one of this pipeline.

        Every process of the world makes all of them in one order: torch names a group by how many there
        are, so that groups made by their members alone miss each other.
        """
        own: dist.ProcessGroup | None = None
        for members in self._pipelines:
            group: dist.ProcessGroup = dist.new_group(
                sorted(members[r] for r in ranks), timeout=self.limit, backend=self.backend, group_desc=name
            )
            own = group if members == self._members else own
        assert own is not None
        self._made.append(own)
        return own

    def control_device(self, device: torch.device) -> torch.device:
        """Where tensors of collectives have to be."""
        return torch.device("cpu") if self.backend == "gloo" else device

    def close(self) -> None:
        for group in self._made:
            if isinstance(group, dist.ProcessGroup):  # else one that this rank is no member of
                dist.destroy_process_group(group)
        self._made = []


def limit_waits(groups: Iterable[dist.ProcessGroup], timeout: float) -> None:
    """Let collectives of groups that a mesh made break off after `timeout` seconds; torch's own limit is 30
    minutes, and a rank that has failed may live on for longer than that.

    The group of the whole job is left as it is: whoever made it waits in it for other things too.
    """
    for group in groups:
        if group is not dist.group.WORLD:
            dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=timeout), group)


def pipelines(mesh: DeviceMesh) -> list[list[int]]:
    """The world ranks of every pipeline, in one order on all processes.

    Of a slice of a larger mesh too, whose `mesh.mesh` has this process's own pipeline alone.
    """
    one = mesh["pp"]
    grid = one._layout.remap_to_tensor(one._rank_map)
    pipelines: list[list[int]] = grid.reshape(-1, one.size()).tolist()
    return pipelines
