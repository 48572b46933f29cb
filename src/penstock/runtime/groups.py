"""The process groups of one pipeline."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


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
