"""Groups of processes: values that they exchange outside of steps, and the process groups of one pipeline."""

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


class Processes(Protocol):
    """The processes that one pipeline runs in: one for each rank, or a single one that holds all ranks."""

    @property
    def index(self) -> int:
        """This process, from 0. Process 0 writes what is written once."""

    @property
    def count(self) -> int: ...

    def gather(self, value: Any) -> list[Any]:
        """Every process's value (anything that JSON can hold), in order, on every process. Collective."""


class Gathering(Protocol):
    """An all-gather that has begun."""

    def wait(self, timeout: datetime.timedelta) -> object:
        """Raises RuntimeError where a process is late or gone."""


class OneProcess:
    """All ranks live in this process."""

    index = 0
    count = 1

    def gather(self, value: Any) -> list[Any]:
        return [value]


# The tensors of the latest collectives. One of gloo's threads frees them shortly after it reports the
# collective complete. If it held the last reference it would need Python, which may be ending by then: that
# aborts the process.
_LATEST: deque[tuple[Tensor, list[Tensor]]] = deque(maxlen=16)


class GroupProcesses:
    """The processes of a process group.

    Args:
        limit: the longest wait for the other processes.
        device: where the group's tensors have to be.
    """

    def __init__(self, group: dist.ProcessGroup, limit: datetime.timedelta, device: torch.device) -> None:
        self._group, self._limit, self._device = group, limit, device
        self.index, self.count = dist.get_rank(group), dist.get_world_size(group)

    def gather(self, value: Any) -> list[Any]:
        return gather(value, self.all_gather)

    def all_gather(self, mine: Tensor) -> list[Tensor]:
        """Every process's tensor, in order; all have one shape and dtype. Collective."""
        work, everyone = self.start_all_gather(mine)
        work.wait(self._limit)
        return everyone

    def start_all_gather(self, mine: Tensor) -> tuple[Gathering, list[Tensor]]:
        """The same, without waiting for it."""
        mine = mine.to(self._device)
        everyone = list(mine.new_empty((self.count, *mine.shape)).unbind())
        work = dist.all_gather(everyone, mine, self._group, async_op=True)
        assert work is not None
        _LATEST.append((mine, everyone))
        return work, everyone


class AllProcesses(GroupProcesses):
    """All processes of the job, before there is a mesh, and so no watch that could name a late process."""

    def __init__(self, timeout: float, device: torch.device) -> None:
        group = dist.group.WORLD
        assert group is not None
        on_device = device if dist.get_backend(group) == "nccl" else torch.device("cpu")
        super().__init__(group, datetime.timedelta(seconds=timeout), on_device)

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


def gather(value: Any, all_gather: Callable[[Tensor], list[Tensor]]) -> list[Any]:
    """Everyone's `value`, by way of an all-gather of float64 vectors of one length."""
    text = json.dumps(value).encode()
    length = torch.tensor([len(text)], dtype=torch.float64)
    longest = int(max(size.item() for size in all_gather(length)))
    padded = torch.zeros(longest, dtype=torch.float64)
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    received = all_gather(padded)
    return [json.loads(bytes(t.to(torch.uint8).tolist()).rstrip(b"\0")) for t in received]


class Groups:
    """Makes process groups among the ranks on the `pp` axis of `mesh`.

    Args:
        timeout: seconds that a collective may take.
        backend: "gloo" or "nccl"; None takes that of the mesh.
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
        self.pipeline = group if fits else self.new(range(len(self._members)), "pp")

    @property
    def size(self) -> int:
        return len(self._members)

    def new(self, ranks: Sequence[int], name: str) -> dist.ProcessGroup:
        """Make a group of these ranks in every pipeline of the mesh; return this pipeline's. Collective.

        Every process of the job makes all of them in one order: torch names a group by how many there are,
        so that groups made by their members alone would not match.
        """
        mine: dist.ProcessGroup | None = None
        for members in self._pipelines:
            group: dist.ProcessGroup = dist.new_group(
                sorted(members[r] for r in ranks), timeout=self.limit, backend=self.backend, group_desc=name
            )
            mine = group if members == self._members else mine
        assert mine is not None
        self._made.append(mine)
        return mine

    def pass_over(self, name: str, meet: Callable[[], object]) -> None:
        """Keep in step with pipelines of the mesh that make a group of all their ranks here. Collective.

        meet: waits for all ranks; a connection that is closed while its other end is being made is an error
        """
        if len(self._pipelines) > 1:
            group = self.new(range(self.size), name)
            meet()
            self._made.remove(group)
            dist.destroy_process_group(group)

    def control_device(self, device: torch.device) -> torch.device:
        """Where the tensors of collectives have to be."""
        return torch.device("cpu") if self.backend == "gloo" else device

    def close(self) -> None:
        for group in self._made:
            if isinstance(group, dist.ProcessGroup):  # otherwise this rank is not a member of it
                dist.destroy_process_group(group)
        self._made = []


def limit_waits(groups: Iterable[dist.ProcessGroup], timeout: float) -> None:
    """Give groups that a mesh made a timeout of `timeout` seconds in place of torch's 30 minutes.

    The group of the whole job keeps its own: whoever made it waits in it for other things too.
    """
    for group in groups:
        if group is not dist.group.WORLD:
            dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=timeout), group)


def pipelines(mesh: DeviceMesh) -> list[list[int]]:
    """The world ranks of every pipeline, in the same order on all processes.

    It works for a slice of a larger mesh too, whose `mesh.mesh` has only this process's own pipeline.
    """
    one = mesh["pp"]
    grid = one._layout.remap_to_tensor(one._rank_map)
    pipelines: list[list[int]] = grid.reshape(-1, one.size()).tolist()
    return pipelines
