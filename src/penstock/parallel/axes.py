"""The axes of the mesh around a pipeline, and their sizes.

pp x dp_replicate x dp_shard x cp x tp      outermost to innermost: neighbours on tp exchange the most
     (ep is folded onto dp_shard x cp)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from penstock.errors import ConfigError, WorldSizeError
from penstock.options import AxisSizes

MESH = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
BATCH = ("dp_replicate", "dp_shard")  # axes whose ranks have different rows of a batch
LOSS = (*BATCH, "cp")  # axes whose ranks have different tokens
_NAMES = {"pp": "the pipeline's ranks"}


@dataclass(frozen=True)
class Axes(AxisSizes):
    """The axes of the mesh around a pipeline: `AxisSizes`. Raises ConfigError for a size that no axis has."""

    def __post_init__(self) -> None:
        unknown = [name for name, size in self.sizes.items() if size == -1]
        if len(unknown) > 1:
            rule = "one axis at most takes all remaining ranks"
            raise ConfigError(f"{' and '.join(unknown)} of -1", rule, "Give all but one a size")
        for name, size in self.sizes.items():
            if not isinstance(size, int) or isinstance(size, bool):
                rule = "an axis has a whole number of ranks"
                raise ConfigError(f"{name}={size!r}", rule, "Give 1 or more, or -1 for all remaining ranks")
            if size < 1 and size != -1:
                raise ConfigError(f"{name}={size}", "an axis has at least one rank", "Give 1, or -1")

    @property
    def sizes(self) -> dict[str, int]:
        return dict(vars(self))

    @property
    def resolved(self) -> bool:
        """Whether every size is known: none is -1."""
        return -1 not in self.sizes.values()

    @property
    def ranks_per_stage(self) -> int:
        """Ranks of the mesh for each rank of the pipeline."""
        return math.prod(self.sizes[name] for name in MESH if name != "pp")

    @property
    def batch_parts(self) -> int:
        """Number of parts of a batch that are processed at the same time."""
        return math.prod(self.sizes[name] for name in BATCH)

    @property
    def shards(self) -> int:
        """Number of ranks over which FSDP2 shards the weights of a stage."""
        return self.dp_shard * self.cp

    @property
    def uses_fsdp(self) -> bool:
        """Whether FSDP2 stands around the stages, or may, where a size is -1."""
        return (self.dp_replicate, self.dp_shard, self.cp) != (1, 1, 1)

    def local_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        """One rank's (rows, tokens per row) of a microbatch of (rows, sequence)."""
        rows, length = shape  # cp pads a row to an even number of equal pieces
        return rows, length if self.cp == 1 else -(-length // (2 * self.cp)) * 2

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
                rule = "one axis at most takes all remaining ranks"
                raise ConfigError(f"the pipeline's ranks and {name} of -1", rule, "Give one of them a size")
        ranks, rest = divmod(world, self.ranks_per_stage)
        if rest or ranks < 1:
            raise WorldSizeError(
                f"{world} processes for {_product(self._factors(-1))}",
                f"each of the pipeline's ranks takes {self.ranks_per_stage} of them",
                f"Start a multiple of {self.ranks_per_stage} processes, or give the axes other sizes",
            )
        return ranks

    def __str__(self) -> str:
        return _product({name: size for name, size in self.sizes.items() if size != 1}) or "none"

    def _factors(self, ranks: int) -> dict[str, int]:
        """The sizes whose product is the number of processes; ep is folded onto others."""
        sizes = {"pp": ranks, **self.sizes}
        return {name: sizes[name] for name in MESH}

    def _with_the_rest(self, ranks: int, world: int) -> Axes:
        """Replace -1 by the size that fits, if there is one."""
        name = next((name for name, size in self.sizes.items() if size == -1), None)
        if name is None:
            return self
        if name == "ep":
            return replace(self, ep=self.shards)
        known = ranks * abs(self.ranks_per_stage)
        return replace(self, **{name: world // known}) if world % known == 0 and world >= known else self

    def _remedies(self, ranks: int, world: int) -> Iterator[str]:
        """Changes of one size after which all sizes fit, some only together with ep=1."""
        changes = list(self._changes(ranks, world))
        yield from changes or (f"{text} with ep=1" for text in replace(self, ep=1)._changes(ranks, world))

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
