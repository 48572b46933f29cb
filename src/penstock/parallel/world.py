"""The world of a pipeline: the ranks that this process hosts, its device, and how ranks communicate."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from penstock.errors import ConfigError, PeerLostError
from penstock.parallel.axes import Axes
from penstock.parallel.mesh import init_process_group, pipeline_mesh
from penstock.parallel.nccl import check_connections, fits_batches, set_environment
from penstock.parallel.reductions import Reductions
from penstock.runtime.health.agreement import facts_of_process, facts_of_schedule
from penstock.runtime.health.watch import Watch
from penstock.runtime.ranks import GroupRanks, Ranks
from penstock.runtime.transport.checksums import CheckedMessages
from penstock.runtime.transport.distributed import (
    DistributedTransport,
    clock_offset,
    times_built,
    watch_of,
)
from penstock.runtime.transport.groups import FOREVER, Groups, naming_peers
from penstock.runtime.transport.interface import LocalTransport, Transport
from penstock.schedule import Schedule

T = TypeVar("T")
_MAKING = "the making of the process groups"


@dataclass(frozen=True)
class WorldOptions:
    """The options of a pipeline that say how its ranks communicate.

    `penstock.pipeline.options.Options` describes them. Here `mesh` has an axis `pp`.
    """

    mesh: DeviceMesh | None = None
    device: torch.device | str | None = None
    timeout: float = 300.0
    transport: str | None = None
    wire: torch.dtype | None = None
    checksums: bool = False
    exchange: str = "auto"
    axes: Axes | None = None

    @property
    def takes_all(self) -> bool:
        """Whether the mesh has all processes of the job. Other processes may not run penstock."""
        return self.mesh is None or self.axes is not None

    @property
    def one_process(self) -> bool:
        """Whether all ranks live in this process: no mesh, and no environment of torchrun."""
        started = dist.is_initialized() or ("RANK" in os.environ and "WORLD_SIZE" in os.environ)
        return self.transport == "local" or (self.mesh is None and not started)

    @property
    def facts(self) -> dict[str, str]:
        """The options that must be equal on all ranks, by name."""
        return {name: str(getattr(self, name)) for name in ("transport", "exchange", "checksums", "axes")}

    def check(self) -> None:
        """Raise ConfigError for a value that no world accepts."""
        if self.wire is not None and not self.wire.is_floating_point:
            rule = "activations and gradients have a floating-point dtype"
            raise ConfigError(f"wire_dtype={self.wire}", rule, "Take torch.bfloat16")
        if self.timeout <= 0:
            rule = "it is the number of seconds that a rank waits, above 0"
            raise ConfigError(f"timeout={self.timeout}", rule, "Give seconds")
        if self.transport not in (None, "nccl", "gloo", "local"):
            rule = "a transport is 'nccl', 'gloo' or 'local'"
            raise ConfigError(f"transport={self.transport!r}", rule, "Leave it out to take what fits")
        if self.exchange not in ("auto", "channels", "batched"):
            rule = "messages go one by one, 'channels', or in batches, 'batched'"
            raise ConfigError(f"exchange={self.exchange!r}", rule, "Take 'auto'")


@dataclass(frozen=True)
class World:
    """An open world.

    ranks: the pipeline's ranks that this process hosts
    processes: the pipeline's processes
    clock_offset: seconds to add to this process's clock to get rank 0's
    batched: whether a rank's messages between two ops go in one batch
    mesh: None where all ranks live in this process
    reductions: sums and agreement over the rest of the mesh
    on_nccl: whether messages go over NCCL
    """

    ranks: tuple[int, ...]
    device: torch.device
    transport: Transport
    processes: Ranks
    clock_offset: float = 0.0
    batched: bool = False
    mesh: DeviceMesh | None = None
    reductions: Reductions = field(default_factory=Reductions)
    on_nccl: bool = False

    @property
    def everyone(self) -> Ranks:
        """The processes of all pipelines where the mesh has other axes, else those of this one."""
        everyone = self.reductions.everyone
        return self.processes if everyone.count == 1 else everyone

    @property
    def alone(self) -> bool:
        """Whether the pipeline has no other process."""
        return self.mesh is None or self.mesh.size() == 1

    def check(self, schedule: Schedule) -> None:
        """Raise ConfigError for a schedule, on the placement of the first, whose messages cannot go here."""
        if self.on_nccl:
            check_connections(schedule, self.batched)


def remaining_ranks(options: WorldOptions) -> int:
    """Number of ranks of a pipeline with ranks=-1: all processes that the other axes leave.

    Raises ConfigError, WorldSizeError where there is no such number.
    """
    if options.one_process:
        raise ConfigError(
            "ranks=-1 in one process",
            "it takes all remaining processes, and there is only this one",
            "Give a number, or start the ranks with torchrun",
        )
    if options.mesh is not None and "pp" in (options.mesh.mesh_dim_names or ()):
        return options.mesh["pp"].size()
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])
    return (options.axes or Axes()).pipeline_ranks(world)


def wake_autograd(device: torch.device) -> None:
    """Run a backward without a matrix product.

    Autograd's thread of a GPU gets its CUDA context with its first kernel. A stage's backward may begin with
    cuBLAS, which would find no context, and torch would warn.
    """
    with torch.enable_grad():
        (torch.ones(1, device=device, requires_grad=True) * 2).backward()  # type: ignore[no-untyped-call]


def open_world(schedule: Schedule, options: WorldOptions, facts: Mapping[str, str] | None = None) -> World:
    """Join the pipeline's other processes, or host all ranks in this one. Collective.

    Args:
        facts: values that must be equal on all ranks, by name

    Raises WorldSizeError, ConfigError, HandshakeError.
    """
    options.check()
    device = _device_of(options)
    if device.type == "cuda":
        set_environment()
        torch.cuda.set_device(device)
        wake_autograd(device)
    if options.one_process:
        return _world_in_one_process(schedule, options, device)
    return _joined_world(schedule, options, device, facts or {})


def _device_of(options: WorldOptions) -> torch.device:
    """This process's device. Raises ConfigError if it is absent, or other options do not work on it."""
    device = torch.device(options.device) if options.device is not None else default_device()
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        gpus = torch.cuda.device_count()
        rule = f"this process sees {gpus} GPU{'' if gpus == 1 else 's'}"
        raise ConfigError(f"device={str(options.device)!r}", rule, "Take another, or device='cpu'")
    if device == torch.device("cuda"):
        device = default_device()  # the GPU of this process
    if options.transport == "nccl" and device.type != "cuda":
        raise ConfigError("transport='nccl'", f"it moves GPU memory, and the device is {device}", "Take gloo")
    if options.checksums and device.type != "cpu":
        rule = f"checksums are computed on the host, and messages of {device} do not go there"
        raise ConfigError("checksums=True", rule, "Leave it out, or take device='cpu'")
    return device


def _world_in_one_process(schedule: Schedule, options: WorldOptions, device: torch.device) -> World:
    _check_one_process(options)
    local = LocalTransport(options.wire)
    _add_checksums(local, schedule, options)
    batched = goes_in_batches(options, "local", schedule)
    return World(tuple(range(schedule.ranks)), device, local, local.ranks, batched=batched)


def _joined_world(
    schedule: Schedule, options: WorldOptions, device: torch.device, facts: Mapping[str, str]
) -> World:
    """Join the pipeline's other processes. Collective."""
    started = init_process_group(device, options.timeout, options.transport)
    common = {**facts_of_process(), **facts_of_schedule(schedule), **options.facts, **facts}
    with _job_watch(options, started) as watch:
        if options.takes_all:  # before any group is made: different ranks would hang in making them
            _all_ranks(options.timeout, device, watch).same("build()", common)
        with nullcontext() if watch is None else naming_peers(watch, _MAKING):
            mesh = _made_together(
                watch, device, lambda: pipeline_mesh(options.mesh, schedule.ranks, device, options.axes)
            )
            groups = Groups(mesh, options.timeout, options.transport, watch)
            transport = DistributedTransport(groups, device, options.timeout, watch)
    batched = goes_in_batches(options, groups.backend, schedule)
    with close_on_error(transport), naming_peers(transport.watch, _MAKING):
        if not options.takes_all:
            transport.ranks.same("build()", common)
        if device.type == "cpu" and options.transport is None:
            transport.share_memory()
        if groups.backend == "nccl":
            check_connections(schedule, batched)
        transport.open(schedule, options.wire, batched=batched)
        _add_checksums(transport, schedule, options)
        offset = clock_offset(transport.ranks)
        reductions = Reductions()
        if options.axes is not None:
            reductions = _made_together(
                watch, device, lambda: Reductions.over(mesh, transport.watch, groups.limit)
            )
            transport.closers.append(reductions.close)
            transport.ranks.mesh = reductions.everyone
    on_nccl, rank = groups.backend == "nccl", transport.rank
    return World((rank,), device, transport, transport.ranks, offset, batched, mesh, reductions, on_nccl)


def _add_checksums(transport: Transport, schedule: Schedule, options: WorldOptions) -> None:
    """Give the messages checksums, if the options say so."""
    if options.checksums:
        hosts = schedule.placement.rank_of
        transport.messages = CheckedMessages(transport.messages, hosts, options.wire, transport.name_of)


def _made_together(watch: Watch | None, device: torch.device, make: Callable[[], T]) -> T:
    """The result of `make`, in which torch makes groups of a mesh. Collective.

    Where a process ends meanwhile, the others notice at once; not on a GPU, of which each thread has its own.
    """
    if watch is None or device.type == "cuda":
        return make()
    return watch.call_together(_MAKING, make, FOREVER)  # torch has a limit


def _all_ranks(timeout: float, device: torch.device, watch: Watch | None) -> GroupRanks:
    """All processes of the job, before any group is made."""
    group = dist.group.WORLD
    assert group is not None
    takes_cpu = any(kind.type == "cpu" for kind in group._device_types)
    return GroupRanks(group, timedelta(seconds=timeout), torch.device("cpu") if takes_cpu else device, watch)


@contextmanager
def _job_watch(options: WorldOptions, started: Watch | None) -> Iterator[Watch | None]:
    """A watch of all processes of the job, made before the pipeline's groups; closed on an error.

    None where other processes of the job may not run penstock.

    started: the watch of the job's start
    """
    if not options.takes_all:
        if started is not None:
            started.close()
        yield None
        return
    watch = started or _new_watch(options)
    with close_on_error(watch):
        yield watch


def _new_watch(options: WorldOptions) -> Watch:
    rank, world = dist.get_rank(), dist.get_world_size()
    try:
        built = times_built(options.timeout)
    except RuntimeError as cause:
        raise PeerLostError(
            f"rank {rank} waiting for the store of the job",
            f"it does not answer: {cause}",
            "Check its machine: that of rank 0, or of the first launcher",
        ) from cause
    return watch_of(f"{built}", rank, world, options.timeout)


def goes_in_batches(options: WorldOptions, backend: str, schedule: Schedule) -> bool:
    """Whether a rank's messages between two ops go in one batch.

    torch forbids a process to use a second NCCL group before it has waited for the first one. So on NCCL all
    messages go through one group, unless the schedule does not allow it.
    """
    if options.exchange == "auto":
        return backend == "nccl" and fits_batches(schedule)
    return options.exchange == "batched"


class _Closes(Protocol):
    def close(self) -> None: ...


@contextmanager
def close_on_error(opened: _Closes) -> Iterator[None]:
    """Close a transport if the block fails, so that a refused pipeline frees its threads and groups."""
    try:
        yield
    except BaseException:
        opened.close()
        raise


def _check_one_process(options: WorldOptions) -> None:
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if options.transport == "local" and count > 1:
        raise ConfigError(
            "transport='local'",
            f"it runs all ranks in one process, and {count} were started",
            "Start one process, or leave transport out",
        )
    if options.transport in ("gloo", "nccl"):
        raise ConfigError(
            f"transport={options.transport!r}",
            "it connects processes, and only this one was started",
            "Start the ranks with torchrun, or leave transport out",
        )


def default_device() -> torch.device:
    """The GPU of this process, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return torch.device("cpu")
