"""The device mesh around a pipeline, and the process groups over its axes."""

from __future__ import annotations

import datetime
import functools
import os
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, rendezvous  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from penstock.errors import ConfigError, ModelError, PeerLostError, StalledPeerError, WorldSizeError
from penstock.parallel.axes import MESH, Axes
from penstock.parallel.nccl import backend_of_gpus
from penstock.runtime.health.limits import within
from penstock.runtime.health.watch import Watch
from penstock.runtime.transport.groups import backend_for, naming_peers, pipelines
from penstock.shortages import shortage


def make_mesh(axes: Axes, ranks: int, device: torch.device) -> DeviceMesh:
    """The mesh over all processes, of resolved axes. Collective."""
    sizes, backend = {"pp": ranks, **axes.sizes}, job_backend(device.type)
    return init_device_mesh(
        device.type,
        tuple(sizes[name] for name in MESH),
        mesh_dim_names=MESH,
        backend_override=dict.fromkeys(MESH, backend),
    )


def job_backend(device: str) -> str:
    """Backend of the whole job. With it, a mesh makes its own groups.

    Otherwise a mesh uses the job's group for an axis with all processes, with the job's time limit.
    """
    job = dist.group.WORLD
    assert job is not None
    return backend_for(job, device)


def present(mesh: DeviceMesh, names: Sequence[str]) -> tuple[str, ...]:
    """The axes among `names` that the mesh has with more than one rank."""
    return tuple(name for name in mesh.mesh_dim_names or () if name in names and mesh[name].size() > 1)


def flattened(mesh: DeviceMesh, names: Sequence[str]) -> DeviceMesh | None:
    """The axes `names` as one axis; None if that would have one rank. Collective."""
    axes = present(mesh, names)
    if len(axes) <= 1:
        return mesh[axes[0]] if axes else None
    return mesh[axes]._flatten("_".join(axes), backend_override=job_backend(mesh.device_type))


# ---- a mesh without processes

_FAR = 1 << 17  # beyond the ranks of any job, as torch caches facts about a mesh by its ranks


@contextmanager
def imagined(axis: str, ranks: int) -> Iterator[DeviceMesh | None]:
    """A mesh of one axis whose other ranks do not exist, for computing without values.

    Collectives over it return at once. None where this process has joined a job, as torch has one at a time.
    """
    if dist.is_initialized():
        yield None
        return
    from penstock.private import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=_FAR, world_size=_FAR + ranks)
    try:
        yield DeviceMesh("cpu", list(range(_FAR, _FAR + ranks)), mesh_dim_names=(axis,))
    finally:
        dist.destroy_process_group()


# ---- the processes of a job, and the mesh over them

# ranks may be further apart at start-up than in a step: importing torch takes seconds on a busy machine
_START_SECONDS = 60.0
_SPARE = 2.0  # seconds after its own limit in which torch gives up
_ASKS = 0.02  # seconds between two polls for ranks that request the name of the attempt
_INTERFACE = "GLOO_SOCKET_IFNAME"


def init_process_group(device: torch.device, timeout: float, backend: str | None = None) -> Watch | None:
    """Initialise torch.distributed from torchrun's environment, unless the caller has done so.

    Returns a watch of all processes; None if the caller has done so.

    Each attempt of a job has its own keys in the store: gloo may hang on those of the previous attempt.

    Args:
        timeout: seconds
        backend: None chooses by the device; gloo where processes share a GPU

    Raises ConfigError where rank 0 cannot listen, or does not answer, and for a network interface that this
    machine lacks; StalledPeerError, PeerLostError where other ranks do not join.
    """
    if dist.is_initialized():
        return None
    _check_interface()
    seconds = max(timeout, _START_SECONDS)
    store, rank, world = _rendezvous(seconds)
    attempt = PrefixStore(f"penstock/{_attempt(store, rank, world, seconds)}", store)
    making = "the making of the job's process group"
    if interface := os.environ.get(_INTERFACE):
        making += f" over {_INTERFACE}={interface}"
    limit = datetime.timedelta(seconds=seconds)
    watch = Watch(PrefixStore("penstock-start", attempt), rank, world, timeout)
    try:
        _await_all(watch, rank, world, seconds)
        if backend is None:
            backend = "gloo" if device.type != "cuda" else backend_of_gpus(attempt, rank, world, device)
        make = functools.partial(
            dist.init_process_group, backend, store=attempt, rank=rank, world_size=world, timeout=limit
        )
        with naming_peers(watch, making):
            if backend == "gloo":
                watch.call_together(making, make, limit)
            else:  # not in a thread, which has its own current GPU
                make()
    except BaseException:
        watch.close()
        raise
    return watch


def _rendezvous(seconds: float) -> tuple[Store, int, int]:
    """The job's store, this process's rank, and the number of processes, from torchrun's environment."""
    limit, silence = datetime.timedelta(seconds=seconds), "the store does not answer"
    try:
        membership: tuple[Store, int, int] = within(
            seconds + _SPARE, silence, lambda: next(rendezvous("env://", timeout=limit))
        )
        return membership
    except RuntimeError as cause:
        if (own := shortage(cause)) is not None:
            raise own from cause
        port, first_line = os.environ.get("MASTER_PORT"), str(cause).splitlines()[0]
        at = f"MASTER_ADDR={os.environ.get('MASTER_ADDR')} MASTER_PORT={port}"
        if "EADDRINUSE" in str(cause):
            raise ConfigError(
                at,
                f"rank 0 listens on port {port}, but another process uses it",
                "End that process, or give another port: torchrun --master-port, or --standalone for one",
            ) from cause
        if "clients joined" in str(cause):  # on rank 0 itself, which has the store and waits for the others
            raise StalledPeerError(_FOR_ALL, first_line, _COME) from cause
        if isinstance(cause, dist.DistError) or silence in str(cause):
            rule = f"rank 0 does not answer there: {first_line}"
            raise ConfigError(at, rule, "Start every rank with the address of rank 0's machine") from cause
        raise


def _attempt(store: Store, rank: int, world: int, seconds: float) -> str:
    """A unique name of this attempt of the job, the same on all its processes. Collective.

    torchrun's agents keep one store over all attempts, and each counts its own restarts: an agent whose ranks
    were alive when another's failed restarts too, but does not count that. So rank 0 draws the name. Each
    process requests it under a key that it has drawn, as requests of earlier attempts are still in the store.

    Raises StalledPeerError where rank 0 does not answer.
    """
    if int(os.environ.get("GROUP_WORLD_SIZE", "1")) == 1:  # one agent, one count
        return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    mine, end = secrets.token_hex(8), time.monotonic() + seconds
    if rank:

        def ask() -> str:
            store.set(f"penstock/asks/{rank}", mine)
            name: str = store.get(f"penstock/answer/{mine}").decode()
            store.set(f"penstock/heard/{mine}", name)
            return name

        try:
            return within(seconds + _SPARE, "rank 0", ask)
        except RuntimeError as cause:
            rule = f"it did not come within {seconds:.0f} s"
            raise StalledPeerError(f"rank {rank} waiting for rank 0", rule, _COME) from cause
    waiting = {*range(1, world)}
    while waiting and time.monotonic() < end:  # the watch will name a rank that never joins
        for other in [*waiting]:
            if store.check([f"penstock/asks/{other}"]):
                asks = store.get(f"penstock/asks/{other}").decode()
                store.set(f"penstock/answer/{asks}", mine)
                heard = f"penstock/heard/{asks}"
                if store.check([heard]) and store.get(heard).decode() == mine:
                    waiting.remove(other)
        time.sleep(_ASKS)
    return mine


_FOR_ALL = "rank 0 waiting for all processes of the job"
_COME = "See why the others did not start, and start all of them together"


def _await_all(watch: Watch, rank: int, world: int, seconds: float) -> None:
    """Wait until all processes of the job have joined its store."""
    missing = watch.absent(seconds)
    if watch.cut_off:
        raise PeerLostError(
            f"rank {rank} waiting for all {world} processes of the job",
            "the store of the job does not answer",
            "Check its machine: that of rank 0, or of the first launcher",
        )
    if missing:
        ranks = " and ".join(f"rank {other}" for other in missing)
        raise StalledPeerError(
            f"rank {rank} waiting for all {world} processes of the job",
            f"{ranks} did not come within {seconds:.0f} s",
            _COME,
        )


def _check_interface() -> None:
    """Raise ConfigError where gloo is set to use a network interface that this machine lacks."""
    named, present = os.environ.get(_INTERFACE, ""), [name for _, name in socket.if_nameindex()]
    host = socket.gethostname()
    for name in filter(None, named.split(",")):
        if name not in present:
            raise ConfigError(
                f"{_INTERFACE}={named}",
                f"machine {host} has no network interface {name}; it has {', '.join(present)}",
                "Name the interface that connects the machines, or leave it out",
            )


def pipeline_mesh(
    mesh: DeviceMesh | None, ranks: int, device: torch.device, axes: Axes | None = None
) -> DeviceMesh:
    """`mesh`, checked, or a new one over all processes with `pp` and `axes`. Collective.

    Raises WorldSizeError where the `pp` axis has not `ranks` ranks or the sizes do not multiply to the number
    of processes; ConfigError for a mesh without these axes.
    """
    world = dist.get_world_size()
    if axes is not None:
        if mesh is not None:
            _check_axes(mesh, ranks, axes)
        axes = axes.resolve(ranks, world)
        if mesh is None:
            return make_mesh(axes, ranks, device)
    if mesh is None:
        if world != ranks:
            raise WorldSizeError(
                f"a world of {world} processes",
                f"a pipeline of {ranks} ranks runs in {ranks} processes, or all in one plain process",
                f"Start it with torchrun --nproc-per-node {ranks}, or set ranks to {world}",
            )
        mesh = init_device_mesh(device.type, (ranks,), mesh_dim_names=("pp",))
    if "pp" not in (mesh.mesh_dim_names or ()):
        raise ConfigError(
            f"a mesh with the axes {mesh.mesh_dim_names}",
            "the pipeline's ranks come from the axis named 'pp'",
            "Name that axis 'pp' in init_device_mesh(..., mesh_dim_names=...)",
        )
    size = mesh["pp"].size()
    if size != ranks:
        raise WorldSizeError(
            f"a mesh with pp={size}",
            f"the pipeline has {ranks} ranks",
            f"Make the mesh's pp axis {ranks} long, or set ranks to {size}",
        )
    if any(members != sorted(members) for members in pipelines(mesh)):
        raise ConfigError(
            f"a mesh whose pp axis runs over the ranks {pipelines(mesh)[0]}",
            "torch numbers the members of a process group in rising order",
            "Lay the mesh out so that ranks rise along its pp axis",
        )
    return mesh


def _check_axes(mesh: DeviceMesh, ranks: int, axes: Axes) -> None:
    names, world = mesh.mesh_dim_names or (), dist.get_world_size()
    remedy = "Leave out mesh, which is then made from axes, or leave out axes"
    if names != MESH:  # torch takes several axes only in the mesh's own order
        raise ConfigError(
            f"axes and a mesh with the axes {', '.join(map(str, names)) or 'without names'}",
            f"such a mesh has the axes {', '.join(MESH)}, in this order",
            remedy,
        )
    if mesh.size() != world:
        rule = "such a mesh has all processes"
        raise ConfigError(f"axes and a mesh of {mesh.size()} of {world} processes", rule, remedy)
    wanted = {"pp": ranks, **axes.sizes}
    sizes = dict(zip(names, mesh.shape, strict=True))
    if wrong := [name for name in names if wanted[name] not in (sizes[name], -1)]:
        changes = [f"{'ranks' if name == 'pp' else name} to {sizes[name]}" for name in wrong]
        raise WorldSizeError(
            f"{', '.join(f'{name}={wanted[name]}' for name in wrong)} and a mesh of {sizes}",
            "the mesh has the sizes that ranks and axes set",
            f"Set {' and '.join(changes)}, or leave mesh out",
        )


def refuse_second_derivative(axis: str) -> None:
    """Raise ModelError in a backward that is to be differentiated, which would leave its exchange out."""
    if torch.is_grad_enabled():
        raise ModelError(
            f"torch.autograd.grad(..., create_graph=True) through a module that {axis} distributes",
            "the backward of an exchange between ranks cannot be differentiated again",
            f"Leave out {axis}, or take the gradient of other modules only",
        )
