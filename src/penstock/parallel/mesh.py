"""The axes of the mesh beside the pipeline's own, and how many ranks each has."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, rendezvous  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from penstock.errors import ConfigError, WorldSizeError
from penstock.runtime.transport.groups import pipelines

# from the outermost to the innermost: neighbours in the last one exchange most, and stand closest together
MESH = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True)
class Axes:
    """How many ranks each axis has; one of them may be -1, for all that are left.

    dp_replicate: copies of everything below, each with data of its own, whose gradients are summed
    dp_shard: ranks over which FSDP2 spreads the weights of a stage; each has data of its own as well
    cp: ranks that a sequence is cut over; ep: ranks that experts are spread over, folded onto those of
        dp_shard x cp; tp: ranks that single matrices are spread over
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    ep: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        open_ended = [name for name, size in self.sizes.items() if size == -1]
        if len(open_ended) > 1:
            rule = "one axis at most takes all that are left"
            raise ConfigError(f"{' and '.join(open_ended)} of -1", rule, "Give all but one a size")
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
    def known(self) -> bool:
        return -1 not in self.sizes.values()

    @property
    def beside(self) -> int:
        """Ranks for each one of the pipeline's."""
        return self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def batches(self) -> int:
        """How many parts of a batch are worked on at the same time."""
        return self.dp_replicate * self.dp_shard

    @property
    def shards(self) -> int:
        """How many ranks FSDP2 spreads a stage's weights over."""
        return self.dp_shard * self.cp

    def part(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Rows and tokens that a rank has of a microbatch of (rows, sequence)."""
        rows, length = shape
        return rows, -(-length // self.cp)

    def filled(self, ranks: int, world: int) -> Axes:
        """Without -1, for a pipeline of `ranks` ranks in a world of so many processes.

        Raises WorldSizeError where that is not their product, ConfigError for an ep that does not fit.
        """
        full = self._with_the_rest(ranks, world)
        product = ranks * full.beside if full.known else 0
        if product != world:
            raise WorldSizeError(
                f"{world} processes for {_times(self._factors(ranks))}",
                "the axes' sizes multiply to the number of processes",
                f"{_capital(' or '.join(self._would_do(ranks, world)))}",
            )
        if not full._deals_out:
            room = full.dp_shard * full.cp
            fitting = [str(size) for size in range(1, room + 1) if room % size == 0]
            raise ConfigError(
                f"ep={full.ep} with dp_shard={full.dp_shard} and cp={full.cp}",
                f"experts are spread over the {room} ranks of dp_shard x cp",
                f"Set ep to {', '.join(fitting[:-1])} or {fitting[-1]}" if room > 1 else "Set ep to 1",
            )
        return full

    def leave(self, world: int) -> int:
        """How many ranks these axes leave to a pipeline that takes all of so many processes (ranks=-1).

        Raises ConfigError where one of them takes what is left itself, WorldSizeError where that is no whole
        number.
        """
        if not self.known:
            name = next(name for name, size in self.sizes.items() if size == -1)
            rule = "one axis at most takes all that are left"
            raise ConfigError(f"the pipeline's ranks and {name} of -1", rule, "Give one of them a size")
        ranks, over = divmod(world, self.beside)
        if over or ranks < 1:
            raise WorldSizeError(
                f"{world} processes for {_times(self._factors(-1))}",
                f"each of the pipeline's ranks takes {self.beside} of them",
                f"Start a multiple of {self.beside} processes, or give the axes other sizes",
            )
        return ranks

    def alone(self, ranks: int) -> Axes:
        """Without -1, for a pipeline whose ranks all live in one process. Raises WorldSizeError, ConfigError
        where there would be others beside it.
        """
        least = replace(self, **{name: 1 for name, size in self.sizes.items() if size == -1})
        if least.beside > 1:
            raise WorldSizeError(
                f"the axes {least} in one process",
                "only the pipeline's own ranks may share a process",
                f"Start {ranks * least.beside} processes with torchrun, or set these axes to 1",
            )
        return least.filled(ranks, ranks)

    @property
    def _deals_out(self) -> bool:
        """Whether experts go evenly over dp_shard x cp; of axes without -1."""
        return self.dp_shard * self.cp % self.ep == 0

    def _factors(self, ranks: int) -> dict[str, int]:
        """What multiplies to the number of processes; ep is folded onto others."""
        return {"pp": ranks, **{name: size for name, size in self.sizes.items() if name != "ep"}}

    def _with_the_rest(self, ranks: int, world: int) -> Axes:
        name = next((name for name, size in self.sizes.items() if size == -1), None)
        if name is None:
            return self
        if name == "ep":
            return replace(self, ep=self.dp_shard * self.cp)
        rest = ranks * abs(self.beside)
        return replace(self, **{name: world // rest}) if world % rest == 0 and world >= rest else self

    def _would_do(self, ranks: int, world: int) -> list[str]:
        """Single changes after each of which everything fits."""
        changes = list(self._changes(ranks, world))
        fitting = [text for text, axes in changes if axes._deals_out]
        return fitting or [f"{text} with ep=1" for text, _ in changes]

    def _changes(self, ranks: int, world: int) -> Iterator[tuple[str, Axes]]:
        """Those after which the product fits, and what the axes are then, without -1."""
        rest = next((name for name, size in self.sizes.items() if size == -1), None)
        closed = [self]
        if rest is not None:  # with more ranks of an axis, experts may go evenly where they do not with one
            closed = [replace(self, **{rest: n + 1}) for n in range(1 if rest == "ep" else max(self.ep, 1))]
        started = next((axes for axes in closed if axes._deals_out), closed[0])
        yield f"start {ranks * started.beside} processes", started
        least = closed[0]
        product = ranks * least.beside
        for name, size in least._factors(ranks).items():
            fits, left = divmod(world * size, product)
            if left or fits == size or name == rest:
                continue
            if name == "pp":
                yield f"set the pipeline's ranks to {fits}", least
            else:
                yield f"set {name} to {fits}", replace(least, **{name: fits})

    def open(self, ranks: int, device: torch.device) -> DeviceMesh:
        """The mesh over the whole world, of filled axes. Collective."""
        sizes, backend = {"pp": ranks, **self.sizes}, own_backend(device.type)
        return init_device_mesh(
            device.type,
            tuple(sizes[name] for name in MESH),
            mesh_dim_names=MESH,
            backend_override=dict.fromkeys(MESH, backend),
        )

    def __str__(self) -> str:
        return _times({name: size for name, size in self.sizes.items() if size != 1}) or "none"


def own_backend(device: str) -> str:
    """What to tell a mesh that is to make groups of its own: else it takes the whole job's for an axis that
    has all processes, whose time limit is not the pipeline's.
    """
    job = dist.group.WORLD
    assert job is not None
    name: str = job._get_backend(torch.device(device)).name()
    return name


def _times(sizes: Mapping[str, int]) -> str:
    return " x ".join(f"{name}={size}" for name, size in sizes.items() if size != 1 or name == "pp")


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


# ---- The processes that a pipeline may use, and which of them make up one pipeline.


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
