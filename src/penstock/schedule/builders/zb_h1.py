"""ZB-H1: split backwards, with the memory of 1F1B.

Qi et al., "Zero Bubble Pipeline Parallelism", 2023 (arXiv 2401.10241), section 2.1.
P = 3 ranks, m = 4 microbatches, the input gradient I and the weight gradient W as long as a forward each:

    rank 0 | F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
    rank 1 | .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    rank 2 | .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

With w = P - 1 - r warm-up forwards and d = r weight gradients put off on rank r:

    warm-up    F_0 ... F_{w-1}
    filling    F_{w+i} I_i                for i = 0 ... d-1
    steady     F_{w+i} I_i W_{i-d}        for i = d ... m-w-1
    cool-down  I_i W_{i-d}                for i = m-w ... m-1
    rest       W_{m-d} ... W_{m-1}

What a rank saves on warm-up forwards it spends on weight gradients: all ranks hold what rank 0 holds in
1F1B, and the gradients reach rank 0 before the others' last W. It is `interleaved_zero_bubble` with one
stage a rank, in torch called ZB1P.

From m = P on rank 0 idles for (P-1)(F + I - W), where W is neither longer than F nor than I, against
(P-1)(F + I + W) in 1F1B. In unit times the makespan is 3m + P-1, the least there is, and the bubble
(P-1) / (3m + P-1); with m < P the makespan is P-m longer. The live activations are min(P, m) on every rank.
"""

from __future__ import annotations

from penstock.schedule.builders.one_f_one_b import split_turns
from penstock.schedule.ops import Schedule
from penstock.schedule.placement import loop


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    programs = (
        split_turns(rank, microbatches, warm_up=ranks - 1 - rank, put_off=rank) for rank in range(ranks)
    )
    return Schedule("zb_h1", loop(ranks), microbatches, tuple(programs))
