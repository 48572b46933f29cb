"""NCCL's requirements: environment variables, one GPU for each rank, and an order of its communicators."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from penstock.errors import ConfigError
from penstock.runtime.plan import channels
from penstock.schedule import Schedule, verify
from penstock.schedule.order import blocked_in_line, exchanges

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_CONNECTIONS = {CONNECTIONS: "32"}  # a GPU's most: one for each communicator, and a few more
_UNSET = 8  # CUDA's own
# torch's watchdog would end a rank that only waits for a failed one, before that rank can say so
_ERRORS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}


def set_environment() -> None:
    """Set variables that the user has not set. Call it before CUDA's context and NCCL's groups are made."""
    for name, value in {**_CONNECTIONS, **_ERRORS}.items():
        os.environ.setdefault(name, value)


def fits_batches(schedule: Schedule) -> bool:
    """Whether the messages of a schedule can go in batches."""
    try:
        exchanges(verify(schedule))
    except ConfigError:
        return False
    return True


def communicators(schedule: Schedule, batched: bool) -> int:
    """The most communicators that a rank needs for messages; other values go over gloo."""
    if batched:
        return 1
    hosts = schedule.placement.rank_of
    ends = [(hosts[channel.source], hosts[channel.target]) for channel in channels(schedule)]
    return max((sum(rank in pair for pair in ends) for rank in range(schedule.ranks)), default=0)


def describe(schedule: Schedule, exchange: str) -> str:
    """The communicators of a rank in words. exchange: as in WorldOptions"""
    batched = exchange == "batched" or (exchange == "auto" and fits_batches(schedule))
    if batched:
        return "1 communicator a rank, for all messages, in batches"
    return f"up to {communicators(schedule, batched)} communicators a rank, one for each edge and direction"


def check_connections(schedule: Schedule, batched: bool) -> None:
    """Raise ConfigError where a GPU might start a rank's work in an order that deadlocks.

    Each communicator has a stream, and compute has one more. With as many hardware queues, no stream blocks
    another; with fewer, the order must be proven for a single queue, the strictest case.
    """
    streams, setting = communicators(schedule, batched) + 1, os.environ.get(CONNECTIONS, "")
    connections = int(setting) if setting.isdecimal() else _UNSET
    if connections >= streams:
        return
    if batched or not blocked_in_line(verify(schedule)):
        return
    raise ConfigError(
        f"{CONNECTIONS}={setting or f'{_UNSET}, as it is unset'} with schedule {schedule.name!r} on NCCL",
        f"a rank's work goes over {streams} streams, and with fewer hardware queues one message blocks "
        "others that it waits for",
        f"Set {CONNECTIONS}=32, or take exchange='batched'",
    )


def shares_a_gpu(store: Store, rank: int, world: int, gpu: str) -> bool:
    """Whether any two processes of the job have the same GPU, which NCCL refuses. Collective.

    gpu: a unique name of this process's GPU
    """
    store.set(f"gpu/{rank}", gpu)
    return len({store.get(f"gpu/{other}") for other in range(world)}) < world


def gpu_name(device: torch.device) -> str:
    """The GPU's unique name in NVIDIA's driver."""
    return str(torch.cuda.get_device_properties(device).uuid)


def backend_of_gpus(
    store: Store, rank: int, world: int, device: torch.device, say: Callable[[str], None] = print
) -> str:
    """NCCL, or gloo where processes share a GPU. Collective."""
    if not shares_a_gpu(store, rank, world, gpu_name(device)):
        return "nccl"
    if rank == 0:
        say(
            "penstock: some ranks share a GPU, which NCCL refuses: messages go over gloo, through pinned "
            "memory. Start one process for each GPU to use NCCL"
        )
    return "gloo"
