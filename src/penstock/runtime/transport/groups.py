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

# where no limit is needed: for the send threads, and for NCCL, whose callers check their own deadlines
FOREVER = datetime.timedelta(days=30)
_LINGERS = datetime.timedelta(seconds=5)  # that an ending process waits for NCCL to end
_SPARE = 2.0  # seconds that gloo may take after its own limit to give up making a group


class Groups:
    """Makes process groups among the ranks on the `pp` axis of `mesh`.

    Args:
        timeout: seconds that a collective may take.
        backend: "gloo" or "nccl"; None takes that of the mesh.
        watch: of all processes of the job, which then notice one that ends while a group is made.
    """

    _aborted = False
    watch: Watch | None = None

    def __init__(
        self, mesh: DeviceMesh, timeout: float, backend: str | None = None, watch: Watch | None = None
    ) -> None:
        self.watch = watch
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
        """Make a gloo group of all ranks, which does not use GPUs. Collective."""
        return self.new(range(self.size), name, backend="gloo")

    def new(
        self, ranks: Sequence[int], name: str, *, messages: bool = False, backend: str | None = None
    ) -> dist.ProcessGroup:
        """Make a group of these ranks in every pipeline of the mesh; return this pipeline's. Collective.

        Every process of the job makes all of them in one order: torch names a group by a counter, so that
        groups made by their members alone would not match.

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
            return new_group(ranks, self.limit, name, self.watch)
        group: dist.ProcessGroup = dist.new_group(
            ranks,
            # NCCL's own timeout begins when the host queues an op, which may be long before it can run
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
        """The device that tensors of collectives must be on."""
        return torch.device("cpu") if self.backend == "gloo" else device

    def abort(self) -> None:
        """Begin to abort collectives of these groups that may never complete. For NCCL only.

        gloo itself ends collectives with a rank that has closed its connections. Does not wait: where a
        process was killed or stopped, torch takes a minute and more.
        """
        if self.backend != "nccl" or self._aborted:
            return
        self._aborted = True
        made = [group for group in self._made if isinstance(group, dist.ProcessGroup)]
        groups = [group for group in (self.pipeline, *made) if backend_for(group, "cuda") == "nccl"]
        for group in groups:
            never_free(group)
        _aborts.append(begun("NCCL's abort", lambda: _abort(groups)))

    def close(self) -> None:
        """Destroy the groups. Nothing is under way in them, so NCCL does not wait."""
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


# for each abort that this process has begun, a function that waits for it
_aborts: list[Callable[[datetime.timedelta], object]] = []


@atexit.register  # before any pipeline exists, so that it runs after the functions that pipelines register
def _end_process() -> None:
    """When Python ends, wait a little for NCCL's aborts; then exit, as torch would wait without a limit."""
    try:
        for ended in _aborts:
            ended(_LINGERS)
    except RuntimeError:
        sys.stdout.flush()
        print("penstock: a rank was lost and NCCL does not end: this process does, with 1", file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)


def never_free(group: dist.ProcessGroup) -> None:
    """Keep the group until the process has ended.

    To free a group, torch waits for its collectives with Python's lock held, and one may never complete.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def new_group(
    ranks: Sequence[int], limit: datetime.timedelta, name: str, watch: Watch | None = None
) -> dist.ProcessGroup:
    """A gloo group of these processes of the job. Collective.

    Raises RuntimeError where a process does not join, or where the store does not answer: torch itself waits
    for an answer without a limit. With a watch of all processes: PeerError, also as soon as one has ended.
    """
    what, longest = f"the making of process group {name!r}", limit + datetime.timedelta(seconds=_SPARE)

    def make() -> dist.ProcessGroup:
        group: dist.ProcessGroup = dist.new_group([*ranks], timeout=limit, backend="gloo", group_desc=name)
        return group

    if watch is None:
        return within(longest.total_seconds(), what, make)
    return watch.call_together(what, make, longest)


def naming_peers(watch: Watch, what: str) -> AbstractContextManager[None]:
    """Raise the typed error if the block fails because of another process. Other errors are not changed."""
    return watch.waiting(what, None, is_of_peer)


def backend_for(group: dist.ProcessGroup, device: str) -> str:
    """The backend of a group for a type of device; for the whole group torch may say 'undefined'."""
    name: str = group._get_backend(torch.device(device)).name()
    return name


_CTAS = 8  # the most thread blocks of a communicator: messages are small, and a block occupies an SM


def message_options() -> Any:
    """NCCL's options of a group for messages: few SMs of the GPU, and a stream of high priority."""
    options: Any = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = FOREVER  # torch uses the group's timeout, and warns where this one differs
    options.config.min_ctas, options.config.max_ctas = 1, _CTAS
    return options


def limit_waits(groups: Iterable[dist.ProcessGroup], timeout: float) -> None:
    """Set the timeout of groups that a mesh made to `timeout` seconds, in place of torch's 30 minutes.

    The group of the whole job keeps its own: the user may wait in it for other things too.
    """
    for group in groups:
        if group is not dist.group.WORLD:
            set_pg_timeout(datetime.timedelta(seconds=timeout), group)


def pipelines(mesh: DeviceMesh) -> list[list[int]]:
    """The world ranks of every pipeline, in the same order on all processes.

    A slice of a larger mesh works too, although its `mesh.mesh` has only this process's pipeline.
    """
    one = mesh["pp"]
    grid = one._layout.remap_to_tensor(one._rank_map)
    pipelines: list[list[int]] = grid.reshape(-1, one.size()).tolist()
    return pipelines
