"""GPipe: all forward, all backward.

Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", 2018
(arXiv 1811.06965). P = 3 ranks, m = 4 microbatches, a backward twice as long as a forward:

    rank 0 | F0 F1 F2 F3 .  .  .  .  .  .  B0 B0 B1 B1 B2 B2 B3 B3
    rank 1 | .  F0 F1 F2 F3 .  .  .  B0 B0 B1 B1 B2 B2 B3 B3 .  .
    rank 2 | .  .  F0 F1 F2 F3 B0 B0 B1 B1 B2 B2 B3 B3 .  .  .  .

    phase 1, on each rank:  F_0 F_1 ... F_{m-1}
    phase 2, on each rank:  B_0 B_1 ... B_{m-1}

Backwards go in the order of the forwards: on every rank the first of them meets the gradient that comes
first. The bubble is (P-1) / (m+P-1), the live activations m on every rank.
"""

from __future__ import annotations

from penstock.schedule.ops import Op, Schedule
from penstock.schedule.placement import loop


def gpipe(ranks: int, microbatches: int) -> Schedule:
    def program(rank: int) -> tuple[Op, ...]:
        forwards = [Op(rank, "F", i) for i in range(microbatches)]
        backwards = [Op(rank, "B", i) for i in range(microbatches)]
        return (*forwards, *backwards)

    return Schedule("gpipe", loop(ranks), microbatches, tuple(program(rank) for rank in range(ranks)))
