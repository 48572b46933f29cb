"""Which layers go to which stage: pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import ConfigError, PartitionError


def even_split(layers: int, stages: int, embedding_weight: int = 1, head_weight: int = 1) -> list[range]:
    """The layers of each stage, dealt out evenly in units.

    The embedding counts as `embedding_weight` layers on the first stage and the head as `head_weight` on
    the last. The units are divided by the stages; the first stages take one of the remainder each. A stage
    whose share would be all embedding or head still gets one layer, from the fullest of the others.

    Raises PartitionError where there are more stages than layers.
    """
    for name, weight in (("embedding_weight", embedding_weight), ("head_weight", head_weight)):
        if weight < 0:
            raise ConfigError(f"{name}={weight}", "it counts layers", "Give 0 or more")
    if stages > layers:
        raise PartitionError(
            f"{stages} stages for {layers} layers",
            "every stage holds at least one layer",
            f"Use at most {layers} stages (ranks times stages per rank), or a deeper model",
        )
    share, remainder = divmod(layers + embedding_weight + head_weight, stages)
    counts = [share + (stage < remainder) for stage in range(stages)]
    counts[0] -= embedding_weight
    counts[-1] -= head_weight
    while min(counts) < 1:
        counts[counts.index(max(counts))] -= 1
        counts[counts.index(min(counts))] += 1
    return _ranges(counts)


def _ranges(counts: Sequence[int]) -> list[range]:
    starts = [sum(counts[:stage]) for stage in range(len(counts))]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]
