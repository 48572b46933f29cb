"""1F1B: one forward, one backward.

Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", 2020 (arXiv 2006.09503), there
called PipeDream-Flush. P = 3 ranks, m = 4 microbatches, a backward twice as long as a forward:

    rank 0 | F0 F1 F2 .  .  .  .  B0 B0 F3 B1 B1 .  B2 B2 .  B3 B3
    rank 1 | .  F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 .  B3 B3 .  .
    rank 2 | .  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 .  .  .  .

With w = min(P - 1 - r, m) warm-up forwards on rank r:

    warm-up    F_0 ... F_{w-1}
    steady     F_{w+i} B_i          for i = 0 ... m-w-1
    cool-down  B_{m-w} ... B_{m-1}

The bubble is GPipe's, (P-1) / (m+P-1); the live activations are min(P - r, m) on rank r.
"""

from __future__ import annotations

from penstock.schedule.ops import Op, Schedule
from penstock.schedule.placement import loop


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    def program(rank: int) -> tuple[Op, ...]:
        warm_up = min(ranks - 1 - rank, microbatches)
        ops = [Op(rank, "F", i) for i in range(warm_up)]
        for i in range(microbatches - warm_up):
            ops += [Op(rank, "F", warm_up + i), Op(rank, "B", i)]
        ops += [Op(rank, "B", i) for i in range(microbatches - warm_up, microbatches)]
        return tuple(ops)

    return Schedule("1f1b", loop(ranks), microbatches, tuple(program(rank) for rank in range(ranks)))
