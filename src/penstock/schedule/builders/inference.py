"""Inference: forwards only.

P = 3 ranks, m = 4 microbatches, one stage a rank:

    rank 0 | F0 F1 F2 F3 .  .
    rank 1 | .  F0 F1 F2 F3 .
    rank 2 | .  .  F0 F1 F2 F3

    on each rank, for each group of up to P microbatches, for each of its stages s:  F_g F_{g+1} ... F_{g+P-1}

With several stages a rank the microbatches go round in groups of P, so that a group comes back to rank 0
just when the last of it has left. The bubble is (P-1) / (v m + P-1) for v stages a rank and m a multiple
of P, and for any m with one stage a rank.
"""

from __future__ import annotations

from penstock.schedule.ops import Op, Schedule
from penstock.schedule.placement import Placement, loop


def inference(ranks: int, microbatches: int, stages_per_rank: int = 1) -> Schedule:
    return forwards(loop(ranks, stages_per_rank), microbatches)


def forwards(placement: Placement, microbatches: int) -> Schedule:
    """The same on any placement; copies of the model take the microbatches in turn."""
    ranks, depth = placement.ranks, placement.depth

    def program(rank: int) -> tuple[Op, ...]:
        return tuple(
            Op(stage, "F", microbatch)
            for group in range(0, microbatches, ranks)
            for stage in placement.stages_of(rank)
            for microbatch in range(group, min(group + ranks, microbatches))
            if microbatch % placement.replicas == stage // depth
        )

    return Schedule("inference", placement, microbatches, tuple(program(rank) for rank in range(ranks)))
