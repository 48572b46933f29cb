"""Which rank hosts which stage."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from penstock.errors import ConfigError


@dataclass(frozen=True)
class Placement:
    """The map from stage to rank: `rank_of[s]` hosts stage s. Every rank hosts at least one stage.

    replicas: how many copies of the model run side by side. With two, stage s and stage s + depth hold the
        same slice of the model, and each microbatch goes through one of the copies.
    """

    rank_of: tuple[int, ...]
    replicas: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.ranks <= self.stages or set(self.rank_of) != set(range(self.ranks)):
            raise ConfigError(
                f"placement {list(self.rank_of)}",
                "each rank from 0 to the highest one hosts at least one stage",
                "Number the ranks from 0 without a gap",
            )
        if self.replicas < 1 or self.stages % self.replicas:
            raise ConfigError(
                f"placement of {self.stages} stages with replicas={self.replicas}",
                "every copy of the model has the same number of stages",
                "Give a number of replicas that divides the stages",
            )

    @cached_property
    def ranks(self) -> int:
        return max(self.rank_of, default=-1) + 1

    @property
    def stages(self) -> int:
        """All stages, each copy's counted."""
        return len(self.rank_of)

    @cached_property
    def depth(self) -> int:
        """The stages that one microbatch goes through."""
        return self.stages // self.replicas

    def is_first(self, stage: int) -> bool:
        return stage % self.depth == 0

    def is_last(self, stage: int) -> bool:
        return stage % self.depth == self.depth - 1

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that `rank` hosts, in the data's order."""
        return tuple(stage for stage, host in enumerate(self.rank_of) if host == rank)


def loop(ranks: int, stages_per_rank: int = 1) -> Placement:
    """Stage s on rank s mod `ranks`: the data runs round the ranks `stages_per_rank` times."""
    return Placement(tuple(stage % ranks for stage in range(ranks * stages_per_rank)))


def wave(ranks: int, stages_per_rank: int = 2) -> Placement:
    """Out and back: the data turns round at both ends. With two stages a rank it draws a V."""
    out = tuple(range(ranks))
    return Placement(tuple(r for lap in range(stages_per_rank) for r in (out[::-1] if lap % 2 else out)))


def both_ways(ranks: int) -> Placement:
    """Two copies of the model: one from the first rank to the last, the other back."""
    return Placement((*range(ranks), *reversed(range(ranks))), replicas=2)
