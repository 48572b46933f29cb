"""All forwards, then all backwards: GPipe and looped BFS; and forwards alone, for inference."""

from __future__ import annotations

from penstock.schedule.ops import Op, Placement, Schedule, loop


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """GPipe: all forward, all backward.

    Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", 2018
    (arXiv 1811.06965). P = 3 ranks, m = 4 microbatches, a backward twice as long as a forward:

        rank 0 | F0 F1 F2 F3 .  .  .  .  .  .  B0 B0 B1 B1 B2 B2 B3 B3
        rank 1 | .  F0 F1 F2 F3 .  .  .  B0 B0 B1 B1 B2 B2 B3 B3 .  .
        rank 2 | .  .  F0 F1 F2 F3 B0 B0 B1 B1 B2 B2 B3 B3 .  .  .  .

        phase 1, on each rank:  F_0 F_1 ... F_{m-1}
        phase 2, on each rank:  B_0 B_1 ... B_{m-1}

    Backwards go in the order of the forwards, because that gradient arrives first. The bubble is
    (P-1) / (m+P-1), and every rank holds m live activations.
    """

    def program(rank: int) -> tuple[Op, ...]:
        forwards = [Op(rank, "F", i) for i in range(microbatches)]
        backwards = [Op(rank, "B", i) for i in range(microbatches)]
        return (*forwards, *backwards)

    return Schedule("gpipe", loop(ranks), microbatches, tuple(program(rank) for rank in range(ranks)))


def looped_bfs(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Looped BFS: all microbatches through a stage before the rank's next one.

    Lamy-Poirier, "Breadth-First Pipeline Parallelism", 2022 (arXiv 2211.05953). P = 3 ranks, m = 3
    microbatches, v = 2 stages per rank, a backward twice as long as a forward:

        rank 0 | 0F0 0F1 0F2 3F0 3F1 3F2 .   .   .   .   .   .   3B0 3B0 3B1 3B1 3B2 3B2 0B0 0B0 0B1 0B1 0B2 0B2
        rank 1 | .   1F0 1F1 1F2 4F0 4F1 4F2 .   .   .   4B0 4B0 4B1 4B1 4B2 4B2 1B0 1B0 1B1 1B1 1B2 1B2 .   .
        rank 2 | .   .   2F0 2F1 2F2 5F0 5F1 5F2 5B0 5B0 5B1 5B1 5B2 5B2 2B0 2B0 2B1 2B1 2B2 2B2 .   .   .   .

    On each rank, with the stages s_0 < s_1 < ... < s_{v-1}:

        phase 1, for s = s_0 ... s_{v-1}:  F_0 F_1 ... F_{m-1}
        phase 2, for s = s_{v-1} ... s_0:  B_0 B_1 ... B_{m-1}

    A stage's ops follow each other, so that sharded weights are gathered once per stage and direction.
    Backwards go in the order of the forwards, as in `gpipe`; torch reverses them, which takes as long.

    The bubble is (P-1) / (v m + P-1) from m = P on. With fewer, each lap waits for microbatch 0 to return
    to rank 0, and the makespan is 3(v P + m-1) in unit times. Every rank holds v m live activations.
    """  # noqa: E501
    placement = loop(ranks, stages_per_rank)

    def program(rank: int) -> tuple[Op, ...]:
        stages = placement.stages_of(rank)
        forwards = [Op(stage, "F", i) for stage in stages for i in range(microbatches)]
        backwards = [Op(stage, "B", i) for stage in reversed(stages) for i in range(microbatches)]
        return (*forwards, *backwards)

    return Schedule("looped_bfs", placement, microbatches, tuple(program(rank) for rank in range(ranks)))


def inference(ranks: int, microbatches: int, stages_per_rank: int = 1) -> Schedule:
    """Inference: forwards only.

    P = 3 ranks, m = 4 microbatches, one stage per rank:

        rank 0 | F0 F1 F2 F3 .  .
        rank 1 | .  F0 F1 F2 F3 .
        rank 2 | .  .  F0 F1 F2 F3

        for each group of up to P microbatches, for each of the rank's stages:  F_g F_{g+1} ... F_{g+P-1}

    With several stages per rank the microbatches pass through the ranks in groups of P: a group returns to
    rank 0 when its last microbatch has left it. The bubble is (P-1) / (v m + P-1) for v stages per rank, if m
    is a multiple of P or v = 1.
    """
    return forwards(loop(ranks, stages_per_rank), microbatches)


def forwards(placement: Placement, microbatches: int) -> Schedule:
    """Inference on any placement; copies of the model take the microbatches in turn."""
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
