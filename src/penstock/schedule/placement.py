"""Which rank hosts which stage."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import ConfigError


@dataclass(frozen=True)
class Placement:
    """The map from stage to rank: `rank_of[s]` hosts stage s. Every rank hosts at least one stage."""

    rank_of: tuple[int, ...]

    def __post_init__(self) -> None:
        if sorted(set(self.rank_of)) != list(range(self.ranks)) or not self.rank_of:
            raise ConfigError(
                f"placement {list(self.rank_of)}",
                "each rank from 0 to the highest one hosts at least one stage",
                "Number the ranks from 0 without a gap",
            )

    @property
    def ranks(self) -> int:
        return max(self.rank_of, default=-1) + 1

    @property
    def stages(self) -> int:
        return len(self.rank_of)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that `rank` hosts, in the data's order."""
        return tuple(stage for stage, host in enumerate(self.rank_of) if host == rank)


def loop(ranks: int, stages_per_rank: int = 1) -> Placement:
    """Stage s on rank s mod `ranks`: the data runs round the ranks `stages_per_rank` times."""
    return Placement(tuple(stage % ranks for stage in range(ranks * stages_per_rank)))
