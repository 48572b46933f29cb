"""ZB-H2: no bubble between a rank's first op and its last, for twice the memory of 1F1B.

Qi et al., "Zero Bubble Pipeline Parallelism", 2023 (arXiv 2401.10241), section 2.2.
P = 3 ranks, m = 5 microbatches, the input gradient I and the weight gradient W as long as a forward each:

    rank 0 | F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4 .  .
    rank 1 | .  F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4 .
    rank 2 | .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4

With w = 2(P - 1 - r) warm-up forwards and d = 2r weight gradients put off on rank r, twice those of
`zb_h1`:

    warm-up    F_0 ... F_{w-1}
    filling    F_{w+i} I_i                for i = 0 ... d-1
    steady     F_{w+i} I_i W_{i-d}        for i = d ... m-w-1
    cool-down  I_i W_{i-d}                for i = m-w ... m-1
    rest       W_{m-d} ... W_{m-1}

Rank 0 fills its wait for the first gradient with forwards, and the last rank ends with weight gradients, as
much later than rank 0 as it began. With m < 2P-1 there are too few forwards for that; d is then m-1-w, kept
within r and 2r.

From m = 2P-1 on rank 0 idles for (P-1)(F + I - 2W) between its first op and its last, and no rank for
longer, where W is neither longer than F nor than I: in unit times not at all, where steps follow each other
without a pause. One step alone takes as long as `zb_h1`: the makespan is 3m + P-1 in unit times, the bubble
(P-1) / (3m + P-1); with m < P the makespan is P-m longer. The live activations are min(2P-1, m) on every
rank.
"""

from __future__ import annotations

from penstock.schedule.builders.one_f_one_b import split_turns
from penstock.schedule.ops import Op, Schedule
from penstock.schedule.placement import loop


def zb_h2(ranks: int, microbatches: int) -> Schedule:
    def program(rank: int) -> tuple[Op, ...]:
        warm_up = 2 * (ranks - 1 - rank)
        put_off = max(rank, min(2 * rank, microbatches - 1 - warm_up))
        return split_turns(rank, microbatches, warm_up, put_off)

    return Schedule("zb_h2", loop(ranks), microbatches, tuple(program(rank) for rank in range(ranks)))
