"""The process groups of one pipeline."""

from __future__ import annotations

import atexit
import ctypes
import datetime
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from penstock.private import set_pg_timeout
from penstock.runtime.health.limits import begun, is_of_peer, within
from penstock.runtime.health.watch import Watch

# where no rank waits: a thread of sends, and NCCL, whose deadlines its callers keep
FOREVER = datetime.timedelta(days=30)
_LINGERS = datetime.timedelta(seconds=5)  # in which a process that ends lets NCCL end
_SPARE = 2.0  # seconds after its own limit in which gloo gives up making a group


class Groups:
    """Makes process groups among the ranks on the `pp` axis of `mesh`.

    Args:
        timeout: seconds that a collective may take.
        backend: "gloo" or "nccl"; None takes that of the mesh.
    """

    _aborted = False

    def __init__(self, mesh: DeviceMesh, timeout: float, backend: str | None = None) -> None:
        pipeline = mesh["pp"]
        group = pipeline.get_group()
        self.rank = pipeline.get_local_rank()
        self.limit = datetime.timedelta(seconds=timeout)
        self.backend = backend or backend_for(group, mesh.device_type)
        self._members = dist.get_process_group_ranks(group)
        self._pipelines = pipelines(mesh)
        self._made: list[dist.ProcessGroup] = []
        # a group may have a backend for each type of device
        fits = {backend_for(group, kind.type) for kind in group._device_types} == {self.backend}
        self.pipeline = group if fits else self.new(range(len(self._members)), "pp")
        # for values: on a GPU a collective that waits for a rank takes time from what that one computes
        self.host = self.pipeline if self.backend == "gloo" else self.new_on_host("pp values")

    @property
    def members(self) -> list[int]:
        """The ranks, as processes of the job."""
        return self._members

    @property
    def size(self) -> int:
        return len(self._members)

    def new_on_host(self, name: str) -> dist.ProcessGroup:
        """Make a group of gloo of all ranks: it leaves GPUs alone. Collective."""
        return self.new(range(self.size), name, backend="gloo")

    def new(
        self, ranks: Sequence[int], name: str, *, messages: bool = False, backend: str | None = None
    ) -> dist.ProcessGroup:
        """Make a group of these ranks in every pipeline of the mesh; return this pipeline's. Collective.

        Every process of the job makes all of them in one order: torch names a group by how many there are,
        so that groups made by their members alone would not match.

        messages: whether it moves messages while the ranks compute
        backend: "gloo" or "nccl"; None takes that of the pipeline
        """
        mine: dist.ProcessGroup | None = None
        for members in self._pipelines:
            group = self._make(sorted(members[r] for r in ranks), name, messages, backend or self.backend)
            mine = group if members == self._members else mine
        assert mine is not None
        self._made.append(mine)
        return mine

    def _make(self, ranks: list[int], name: str, messages: bool, backend: str) -> dist.ProcessGroup:
        if backend != "nccl":
            return new_group(ranks, self.limit, name)
        group: dist.ProcessGroup = dist.new_group(
            ranks,
            # NCCL's own count begins when the host queues an op, which may be long before it can run
            timeout=FOREVER,
            backend=backend,
            pg_options=message_options() if messages else None,
            group_desc=name,
        )
        return group

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

    def abort(self) -> None:
        """Begin to end what is under way in these groups and may never complete. For NCCL alone.

        gloo ends what waits for a rank that has closed its connections. Does not wait: where a process was
        killed or stopped, torch takes a minute and more.
        """
        if self.backend != "nccl" or self._aborted:
            return
        self._aborted = True
        made = [each for each in self._made if isinstance(each, dist.ProcessGroup)]
        groups = [each for each in (self.pipeline, *made) if backend_for(each, "cuda") == "nccl"]
        for group in groups:
            never_free(group)
        _aborts.append(begun("NCCL's abort", lambda: _abort(groups)))

    def close(self) -> None:
        """Where nothing has failed, NCCL first completes what is under way: nothing is."""
        for group in () if self._aborted else self._made:
            if isinstance(group, dist.ProcessGroup):  # otherwise this rank is not a member of it
                dist.destroy_process_group(group)
        self._made = []


def _abort(groups: Sequence[dist.ProcessGroup]) -> None:
    backend: Any = groups[0]._get_backend(torch.device("cuda"))
    together = hasattr(backend, "_group_start")  # not where torch wraps it for debugging
    if together:  # one by one, communicators may wait for each other
        backend._group_start()
    for group in groups:
        group.abort()
    if together:
        backend._group_end()


# what waits for each that has begun in this process
_aborts: list[Callable[[datetime.timedelta], object]] = []


@atexit.register  # before anybody has a pipeline, so that it runs after what they register
def _end_process() -> None:
    """Python ends: let NCCL end first, or end without it, as torch would wait for it with no limit."""
    try:
        for ended in _aborts:
            ended(_LINGERS)
    except RuntimeError:
        sys.stdout.flush()
        print("penstock: a rank was lost and NCCL does not end: this process does, with 1", file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)


def never_free(group: dist.ProcessGroup) -> None:
    """Keep the group until the process is gone.

    As one is freed in which a collective may not complete, torch waits for that, and holds Python's lock.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def new_group(ranks: Sequence[int], limit: datetime.timedelta, name: str) -> dist.ProcessGroup:
    """A gloo group of these processes of the job. Collective.

    Raises RuntimeError where a process does not come, or where the store does not answer: torch itself waits
    for that without a limit.
    """
    group: dist.ProcessGroup = within(
        limit.total_seconds() + _SPARE,
        f"the making of process group {name!r}",
        lambda: dist.new_group([*ranks], timeout=limit, backend="gloo", group_desc=name),
    )
    return group


def naming_peers(watch: Watch, what: str) -> AbstractContextManager[None]:
    """Raise the typed error where the block fails because of another process. Other errors pass."""
    return watch.waiting(what, None, is_of_peer)


def backend_for(group: dist.ProcessGroup, device: str) -> str:
    """The backend that a group has for a type of device; for the group torch may say 'undefined'."""
    name: str = group._get_backend(torch.device(device)).name()
    return name


_CTAS = 8  # at most, of a communicator: messages are small, and each takes a processor from the kernels


def message_options() -> Any:
    """NCCL's options of a group for messages: few processors of the GPU, and first in turn for them."""
    options: Any = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = FOREVER  # torch takes the group's own, and warns where this is another one
    options.config.min_ctas, options.config.max_ctas = 1, _CTAS
    return options


def limit_waits(groups: Iterable[dist.ProcessGroup], timeout: float) -> None:
    """Give groups that a mesh made a timeout of `timeout` seconds in place of torch's 30 minutes.

    The group of the whole job keeps its own: whoever made it waits in it for other things too.
    """
    for group in groups:
        if group is not dist.group.WORLD:
            set_pg_timeout(datetime.timedelta(seconds=timeout), group)


def pipelines(mesh: DeviceMesh) -> list[list[int]]:
    """The world ranks of every pipeline, in the same order on all processes.

    It works for a slice of a larger mesh too, whose `mesh.mesh` has only this process's own pipeline.
    """
    one = mesh["pp"]
    grid = one._layout.remap_to_tensor(one._rank_map)
    pipelines: list[list[int]] = grid.reshape(-1, one.size()).tolist()
    return pipelines
