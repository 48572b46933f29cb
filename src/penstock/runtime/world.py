"""Where a pipeline runs: which of its ranks this process holds, on which device, and how they talk."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from penstock.errors import ConfigError
from penstock.runtime.distributed import DistributedTransport, clock_offset
from penstock.runtime.lower import channels
from penstock.runtime.mesh import init_process_group, pipeline_mesh
from penstock.runtime.processes import OneProcess, Processes
from penstock.runtime.transport import LocalTransport, Transport
from penstock.schedule import Schedule


@dataclass(frozen=True)
class World:
    """ranks: those of this process; clock_offset: what makes this process's clock rank 0's, in seconds"""

    ranks: tuple[int, ...]
    device: torch.device
    transport: Transport
    processes: Processes
    clock_offset: float = 0.0


def one_rank_per_process(mesh: DeviceMesh | None) -> bool:
    """Whether this process is one rank of many: a mesh was given, or torchrun's environment is there."""
    return mesh is not None or dist.is_initialized() or ("RANK" in os.environ and "WORLD_SIZE" in os.environ)


def open_world(
    schedule: Schedule, mesh: DeviceMesh | None, device: torch.device | str | None, timeout: float
) -> World:
    """Join the pipeline's other processes, or hold all ranks in this one.

    timeout: seconds that a rank may wait for another. Raises WorldSizeError, ConfigError.
    """
    if timeout <= 0:
        raise ConfigError(f"timeout={timeout}", "a rank waits for a while before it gives up", "Give seconds")
    chosen = torch.device(device) if device is not None else _default_device()
    if chosen == torch.device("cuda"):
        chosen = _default_device()  # the one of this process
    if not one_rank_per_process(mesh):
        return World(tuple(range(schedule.ranks)), chosen, LocalTransport(), OneProcess())
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    init_process_group(chosen, timeout)
    pipeline = pipeline_mesh(mesh, schedule.ranks, chosen)
    transport = DistributedTransport(pipeline, schedule.placement, channels(schedule), chosen, timeout)
    return World((transport.rank,), chosen, transport, transport, clock_offset(transport))


def _default_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return torch.device("cpu")
