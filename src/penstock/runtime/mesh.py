"""The processes that a pipeline may use, and which of them make up one pipeline."""

from __future__ import annotations

import datetime
import os

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, rendezvous  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from penstock.errors import ConfigError, WorldSizeError
from penstock.runtime.axes import MESH, Axes
from penstock.runtime.groups import pipelines

# ranks may start further apart than they may be in a step: importing torch alone takes seconds on a busy
# machine
_START_SECONDS = 60.0


def init_process_group(device: torch.device, timeout: float, backend: str | None = None) -> None:
    """Initialise torch.distributed from torchrun's environment, unless the caller has done so.

    backend: None takes what fits the device

    Each restart of a job has keys of its own in the store: gloo may hang on those of the last attempt.
    """
    if dist.is_initialized():
        return
    limit = datetime.timedelta(seconds=max(timeout, _START_SECONDS))
    store, rank, world = next(rendezvous("env://", timeout=limit))
    attempt = PrefixStore(f"penstock/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    fitting = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend or fitting, store=attempt, rank=rank, world_size=world, timeout=limit)


def pipeline_mesh(
    mesh: DeviceMesh | None, ranks: int, device: torch.device, axes: Axes | None = None
) -> DeviceMesh:
    """`mesh`, or one over the whole world, with `axes` beside the pipeline's own.

    Raises WorldSizeError where its `pp` axis is not `ranks` long, or the world not the product of the axes;
    ConfigError for a mesh that has not the axes.
    """
    if axes is not None:
        if mesh is not None:
            _check_axes(mesh, ranks, axes)
        axes = axes.filled(ranks, dist.get_world_size())
        if mesh is None:
            return axes.open(ranks, device)
    if mesh is None:
        if dist.get_world_size() != ranks:
            raise WorldSizeError(
                f"a world of {dist.get_world_size()} processes",
                f"a pipeline of {ranks} ranks runs in {ranks} processes, or all in one plain process",
                f"Start it with torchrun --nproc-per-node {ranks}, or set ranks to {dist.get_world_size()}",
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
    names = mesh.mesh_dim_names or ()
    if names != MESH:  # torch takes several axes at once in the mesh's own order alone
        raise ConfigError(
            f"axes beside a mesh with the axes {', '.join(map(str, names)) or 'without names'}",
            f"such a mesh has the axes {', '.join(MESH)}, in this order",
            "Leave mesh out, and it is made, or leave axes out",
        )
    if mesh.size() != dist.get_world_size():
        raise ConfigError(
            f"axes beside a mesh of {mesh.size()} of {dist.get_world_size()} processes",
            "such a mesh has all of them",
            "Leave mesh out, and it is made, or leave axes out",
        )
    said = {"pp": ranks, **axes.sizes}
    there = dict(zip(names, mesh.shape, strict=True))
    if wrong := [name for name in names if said[name] not in (there[name], -1)]:
        changes = [f"{'ranks' if name == 'pp' else name} to {there[name]}" for name in wrong]
        raise WorldSizeError(
            f"{', '.join(f'{name}={said[name]}' for name in wrong)} beside a mesh of {there}",
            "the mesh's axes are as long as ranks and axes say",
            f"Set {' and '.join(changes)}, or leave mesh out, and it is made",
        )
