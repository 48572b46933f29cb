"""Where a pipeline runs: which of its ranks this process holds, on which device, and how they talk."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from penstock.errors import ConfigError
from penstock.parallel.mesh import Axes, init_process_group, pipeline_mesh
from penstock.parallel.reductions import MeshReductions, NoReductions, Reductions
from penstock.runtime.health.agreement import facts_of_process, facts_of_schedule, shake_hands
from penstock.runtime.transport.distributed import DistributedTransport, clock_offset
from penstock.runtime.transport.emulated import Network
from penstock.runtime.transport.groups import AllProcesses, Groups, OneProcess, Processes
from penstock.runtime.transport.interface import LocalTransport, Transport
from penstock.schedule import Schedule


@dataclass(frozen=True)
class World:
    """ranks: those of this process; clock_offset: what makes this process's clock rank 0's, in seconds

    batched: whether what a rank sends and receives between two ops goes together
    mesh: where the pipeline's ranks, and those beside them, come from; None where all live in this process
    sums: what is summed over the ranks beside the pipeline
    """

    ranks: tuple[int, ...]
    device: torch.device
    transport: Transport
    processes: Processes
    clock_offset: float = 0.0
    batched: bool = False
    mesh: DeviceMesh | None = None
    sums: Reductions = field(default_factory=NoReductions)

    @property
    def alone(self) -> bool:
        """Whether no other process has a part in what this one does."""
        return self.mesh is None or self.mesh.size() == 1

    def closed_on_error(self) -> AbstractContextManager[None]:
        """While a pipeline is made in it: one that is refused lets go of its threads and process groups."""
        return _closed_on_error(self.transport)


def one_rank_per_process(mesh: DeviceMesh | None) -> bool:
    """Whether this process is one rank of many: a mesh was given, or torchrun's environment is there."""
    return mesh is not None or dist.is_initialized() or ("RANK" in os.environ and "WORLD_SIZE" in os.environ)


def ranks_left(link: WorldOptions) -> int:
    """How many ranks a pipeline has that takes all processes which the axes beside it leave (ranks=-1).

    Raises ConfigError, WorldSizeError where there is no such number.
    """
    if link.transport == "local" or not one_rank_per_process(link.mesh):
        raise ConfigError(
            "ranks=-1 in one process",
            "it takes the processes that are left, and no others were started",
            "Give a number, or start the ranks with torchrun",
        )
    if link.mesh is not None and "pp" in (link.mesh.mesh_dim_names or ()):
        return link.mesh["pp"].size()
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])
    return (link.axes or Axes()).leave(world)


@dataclass(frozen=True)
class WorldOptions:
    """How ranks talk.

    mesh: a DeviceMesh with an axis `pp`; None takes all processes for the pipeline
    device: None takes the GPU of this process, or the CPU
    timeout: seconds that a rank waits for another before it gives up
    transport: "nccl"; "gloo", which goes by way of host memory where tensors are on a GPU, so that ranks can
        share one; "local", all ranks in this process; None takes what fits
    wire: what floating-point tensors travel as; None leaves them as they are
    exchange: "channels", where each message goes by itself as soon as it can; or "batched", where what a rank
        sends and receives between two ops goes in one exchange with all its neighbours
    network: one to emulate, slower than what there is, for experiments
    axes: the mesh's other axes, where it is to be made; None takes what `mesh` has, or none
    overlap: whether pairs of ops that the schedule marks run side by side; on a GPU they do not, as both
        ops' kernels go to one stream
    """

    mesh: DeviceMesh | None = None
    device: torch.device | str | None = None
    timeout: float = 300.0
    transport: str | None = None
    wire: torch.dtype | None = None
    exchange: str = "channels"
    network: Network | None = None
    axes: Axes | None = None
    overlap: bool = False

    @property
    def batched(self) -> bool:
        return self.exchange == "batched"

    @property
    def takes_all(self) -> bool:
        """Whether the mesh has all processes of the job; else other pipelines may be anything."""
        return self.mesh is None or self.axes is not None

    @property
    def facts(self) -> dict[str, str]:
        """What has to be the same on all ranks."""
        return {"exchange": self.exchange, "network": str(self.network), "axes": str(self.axes),
                "overlap": str(self.overlap)}  # fmt: skip

    def check(self) -> None:
        """Raises ConfigError."""
        if self.wire is not None and not self.wire.is_floating_point:
            rule = "activations and gradients are of floating point"
            raise ConfigError(f"wire_dtype={self.wire}", rule, "Take torch.bfloat16")
        if self.timeout <= 0:
            rule = "a rank waits for a while before it gives up"
            raise ConfigError(f"timeout={self.timeout}", rule, "Give seconds")
        if self.transport not in (None, "nccl", "gloo", "local"):
            rule = "a transport is 'nccl', 'gloo' or 'local'"
            raise ConfigError(f"transport={self.transport!r}", rule, "Leave it out to take what fits")
        if self.exchange not in ("channels", "batched"):
            rule = "messages go each by itself, 'channels', or all of a moment together, 'batched'"
            raise ConfigError(f"exchange={self.exchange!r}", rule, "Take 'channels'")


def open_world(schedule: Schedule, link: WorldOptions, facts: Mapping[str, str] | None = None) -> World:
    """Join the pipeline's other processes, or hold all ranks in this one.

    facts: what has to be the same on all ranks, by name. Raises WorldSizeError, ConfigError, HandshakeError.
    """
    link.check()
    device = torch.device(link.device) if link.device is not None else _default_device()
    if device == torch.device("cuda"):
        device = _default_device()  # the one of this process
    if link.transport == "nccl" and device.type != "cuda":
        raise ConfigError("transport='nccl'", f"it moves GPU memory, and the device is {device}", "Take gloo")
    if link.network is not None and device.type != "cpu":
        rule = f"when an op has ended is known at once on the CPU only, and the device is {device}"
        raise ConfigError(f"network={link.network}", rule, "Take device='cpu', or leave network out")
    overlap = link.overlap and bool(schedule.overlaps) and device.type == "cpu"
    if link.transport == "local" or not one_rank_per_process(link.mesh):
        _check_alone(link)
        here = LocalTransport(link.wire)
        here.overlap = overlap
        return World(tuple(range(schedule.ranks)), device, here, OneProcess(), batched=link.batched)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    init_process_group(device, link.timeout, link.transport)
    common = {**facts_of_process(), **facts_of_schedule(schedule), **link.facts, **(facts or {})}
    if link.takes_all:  # before any group is made: ranks that differ would hang in making them
        shake_hands(AllProcesses(link.timeout, device), common)
    mesh = pipeline_mesh(link.mesh, schedule.ranks, device, link.axes)
    groups = Groups(mesh, link.timeout, link.transport)
    transport = DistributedTransport(groups, device, link.timeout)
    transport.overlap = overlap
    with _closed_on_error(transport):
        if not link.takes_all:
            shake_hands(transport, common)
        transport.open(schedule, link.wire, batched=link.batched, network=link.network)
        offset = clock_offset(transport)
        sums: Reductions = NoReductions()
        if link.axes is not None:
            sums = beside = MeshReductions(mesh, transport.watch, groups.limit)
            transport.closers.append(beside.close)
            transport.beside(beside.token())
    return World((transport.rank,), device, transport, transport, offset, link.batched, mesh, sums)


@contextmanager
def _closed_on_error(transport: Transport) -> Iterator[None]:
    try:
        yield
    except BaseException:
        transport.close()
        raise


def _check_alone(link: WorldOptions) -> None:
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if link.transport == "local" and count > 1:
        raise ConfigError(
            "transport='local'",
            f"it holds all ranks in one process, and {count} were started",
            "Start one process, or leave transport out",
        )
    if link.network is not None:
        raise ConfigError(
            f"network={link.network}",
            "it delays messages between processes, and all ranks are in this one",
            "Start the ranks with torchrun, or simulate() the schedule with these costs",
        )
    if link.transport in ("gloo", "nccl"):
        raise ConfigError(
            f"transport={link.transport!r}",
            "it joins processes, and this one was started alone",
            "Start the ranks with torchrun, or leave transport out",
        )


def _default_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return torch.device("cpu")
