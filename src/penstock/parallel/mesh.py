"""The device mesh around a pipeline: how many ranks each axis has, and the process groups over its axes.

pp x dp_replicate x dp_shard x cp x tp      outermost to innermost: neighbours on tp exchange the most
     (ep is folded onto dp_shard x cp)
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, rendezvous  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from penstock.errors import ConfigError, WorldSizeError
from penstock.runtime.transport.groups import pipelines

MESH = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
BATCH = ("dp_replicate", "dp_shard")  # axes whose ranks have different rows of a batch
LOSS = (*BATCH, "cp")  # axes whose ranks have different tokens
_NAMES = {"pp": "the pipeline's ranks"}


@dataclass(frozen=True)
class Axes:
    """Number of ranks on each axis of the mesh other than `pp`. At most one may be -1: all remaining ranks.

    Args:
        dp_replicate: copies of everything below, each with its own data, whose gradients are summed
        dp_shard: ranks over which FSDP2 shards the weights of a stage; each has its own data as well
        cp: ranks over which a sequence is split
        ep: ranks over which experts are distributed, folded onto those of dp_shard x cp
        tp: ranks over which single matrices are sharded

    Raises:
        ConfigError: a size is no number of ranks.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    ep: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        unknown = [name for name, size in self.sizes.items() if size == -1]
        if len(unknown) > 1:
            rule = "one axis at most takes all that are left"
            raise ConfigError(f"{' and '.join(unknown)} of -1", rule, "Give all but one a size")
        for name, size in self.sizes.items():
            if not isinstance(size, int) or isinstance(size, bool):
                rule = "an axis has a whole number of ranks"
                raise ConfigError(f"{name}={size!r}", rule, "Give 1 or more, or -1 for all that are left")
            if size < 1 and size != -1:
                raise ConfigError(f"{name}={size}", "an axis has one rank at least", "Give 1, or -1")

    @property
    def sizes(self) -> dict[str, int]:
        return asdict(self)

    @property
    def resolved(self) -> bool:
        """Whether every size is known: none is -1."""
        return -1 not in self.sizes.values()

    @property
    def ranks_per_stage(self) -> int:
        """Ranks of the mesh for each rank of the pipeline."""
        return self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def batch_parts(self) -> int:
        """Number of parts of a batch that are processed at the same time."""
        return self.dp_replicate * self.dp_shard

    @property
    def shards(self) -> int:
        """Number of ranks over which FSDP2 shards the weights of a stage."""
        return self.dp_shard * self.cp

    def local_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Rows and tokens per row that one rank has of a microbatch of (rows, sequence)."""
        rows, length = shape
        return rows, -(-length // self.cp)

    def resolve(self, ranks: int, world: int) -> Axes:
        """Replace -1, for a pipeline of `ranks` ranks in a world of `world` processes.

        Raises WorldSizeError unless the product of all sizes is `world`; ConfigError for an ep that does not
        divide dp_shard x cp.
        """
        full = self._with_the_rest(ranks, world)
        if not full.resolved or ranks * full.ranks_per_stage != world:
            remedy = " or ".join(self._remedies(ranks, world))
            raise WorldSizeError(
                f"{world} processes for {_product(self._factors(ranks))}",
                "the axes' sizes multiply to the number of processes",
                remedy[:1].upper() + remedy[1:],
            )
        if full.shards % full.ep:
            sizes = [str(size) for size in range(1, full.shards + 1) if full.shards % size == 0]
            raise ConfigError(
                f"ep={full.ep} with dp_shard={full.dp_shard} and cp={full.cp}",
                f"experts are distributed over the {full.shards} ranks of dp_shard x cp",
                f"Set ep to {', '.join(sizes[:-1])} or {sizes[-1]}" if len(sizes) > 1 else "Set ep to 1",
            )
        return full

    def resolve_in_one_process(self, ranks: int) -> Axes:
        """Replace -1, for a pipeline whose ranks all live in one process.

        Raises WorldSizeError where an axis needs other processes, ConfigError as `resolve`.
        """
        least = replace(self, **{name: 1 for name, size in self.sizes.items() if size == -1})
        if least.ranks_per_stage > 1:
            raise WorldSizeError(
                f"the axes {least} in one process",
                "only the pipeline's own ranks may share a process",
                f"Start {ranks * least.ranks_per_stage} processes with torchrun, or set these axes to 1",
            )
        return least.resolve(ranks, ranks)

    def pipeline_ranks(self, world: int) -> int:
        """Number of ranks that a pipeline with ranks=-1 has in a world of `world` processes.

        Raises ConfigError where an axis is -1 too, WorldSizeError where the axes do not divide the world.
        """
        for name, size in self.sizes.items():
            if size == -1:
                rule = "one axis at most takes all that are left"
                raise ConfigError(f"the pipeline's ranks and {name} of -1", rule, "Give one of them a size")
        ranks, rest = divmod(world, self.ranks_per_stage)
        if rest or ranks < 1:
            raise WorldSizeError(
                f"{world} processes for {_product(self._factors(-1))}",
                f"each of the pipeline's ranks takes {self.ranks_per_stage} of them",
                f"Start a multiple of {self.ranks_per_stage} processes, or give the axes other sizes",
            )
        return ranks

    def make_mesh(self, ranks: int, device: torch.device) -> DeviceMesh:
        """The mesh over all processes, of resolved axes. Collective."""
        sizes, backend = {"pp": ranks, **self.sizes}, job_backend(device.type)
        return init_device_mesh(
            device.type,
            tuple(sizes[name] for name in MESH),
            mesh_dim_names=MESH,
            backend_override=dict.fromkeys(MESH, backend),
        )

    def __str__(self) -> str:
        return _product({name: size for name, size in self.sizes.items() if size != 1}) or "none"

    def _factors(self, ranks: int) -> dict[str, int]:
        """The sizes whose product is the number of processes; ep is folded onto others."""
        return {"pp": ranks, **{name: size for name, size in self.sizes.items() if name != "ep"}}

    def _with_the_rest(self, ranks: int, world: int) -> Axes:
        """With the size that fits in place of -1, if there is one."""
        name = next((name for name, size in self.sizes.items() if size == -1), None)
        if name is None:
            return self
        if name == "ep":
            return replace(self, ep=self.shards)
        known = ranks * abs(self.ranks_per_stage)
        return replace(self, **{name: world // known}) if world % known == 0 and world >= known else self

    def _remedies(self, ranks: int, world: int) -> Iterator[str]:
        """Single changes after which all sizes fit; some only together with ep=1."""
        found = list(self._changes(ranks, world))
        yield from found or (f"{text} with ep=1" for text in replace(self, ep=1)._changes(ranks, world))

    def _changes(self, ranks: int, world: int) -> Iterator[str]:
        least = ranks * abs(self.ranks_per_stage)
        worlds = (least * times for times in range(1, max(self.ep, 1) + 1))  # ep divides one of them
        if enough := next((count for count in worlds if self._fits(ranks, count)), None):
            yield f"start {enough} processes"
        for name, size in self._factors(ranks).items():
            others = range(1, world + 1) if size != -1 else ()
            if name == "pp":
                fitting = [other for other in others if self._fits(other, world)]
            else:
                fitting = [other for other in others if replace(self, **{name: other})._fits(ranks, world)]
            if fitting:
                _, nearest = min((abs(other - size), other) for other in fitting)
                yield f"set {_NAMES.get(name, name)} to {nearest}"

    def _fits(self, ranks: int, world: int) -> bool:
        full = self._with_the_rest(ranks, world)
        return full.resolved and ranks * full.ranks_per_stage == world and full.shards % full.ep == 0


def _product(sizes: Mapping[str, int]) -> str:
    return " x ".join(f"{name}={size}" for name, size in sizes.items() if size != 1 or name == "pp")


def job_backend(device: str) -> str:
    """Backend of the whole job, to pass to a mesh that must make its own groups.

    Without it a mesh takes the job's group for an axis with all processes, with the job's time limit.
    """
    job = dist.group.WORLD
    assert job is not None
    name: str = job._get_backend(torch.device(device)).name()
    return name


def present(mesh: DeviceMesh, names: Sequence[str]) -> tuple[str, ...]:
    """The axes among `names` that the mesh has with more than one rank."""
    return tuple(name for name in mesh.mesh_dim_names or () if name in names and mesh[name].size() > 1)


def flattened(mesh: DeviceMesh, names: Sequence[str]) -> DeviceMesh | None:
    """The axes `names` as one axis; None where that would have one rank. Collective."""
    axes = present(mesh, names)
    if len(axes) <= 1:
        return mesh[axes[0]] if axes else None
    return mesh[axes]._flatten("_".join(axes), backend_override=job_backend(mesh.device_type))


# ---- the processes of a job, and the mesh over them

# ranks may start further apart than they may be in a step: importing torch takes seconds on a busy machine
_START_SECONDS = 60.0


def init_process_group(device: torch.device, timeout: float, backend: str | None = None) -> None:
    """Initialise torch.distributed from torchrun's environment, unless the caller has done so.

    Each restart of a job has its own keys in the store: gloo may hang on those of the last attempt.

    Args:
        timeout: seconds
        backend: None takes what fits the device
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
            return axes.make_mesh(ranks, device)
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
    remedy = "Leave out mesh, and one is made, or leave out axes"
    if names != MESH:  # torch takes several axes at once in the mesh's own order alone
        raise ConfigError(
            f"axes and a mesh with the axes {', '.join(map(str, names)) or 'without names'}",
            f"such a mesh has the axes {', '.join(MESH)}, in this order",
            remedy,
        )
    if mesh.size() != world:
        rule = "such a mesh has all processes"
        raise ConfigError(f"axes and a mesh of {mesh.size()} of {world} processes", rule, remedy)
    wanted = {"pp": ranks, **axes.sizes}
    found = dict(zip(names, mesh.shape, strict=True))
    if wrong := [name for name in names if wanted[name] not in (found[name], -1)]:
        changes = [f"{'ranks' if name == 'pp' else name} to {found[name]}" for name in wrong]
        raise WorldSizeError(
            f"{', '.join(f'{name}={wanted[name]}' for name in wrong)} and a mesh of {found}",
            "the mesh's axes are as long as ranks and axes say",
            f"Set {' and '.join(changes)}, or leave mesh out, and one is made",
        )
