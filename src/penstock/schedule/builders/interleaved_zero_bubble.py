"""Interleaved zero bubble: split backwards, with several stages a rank.

Qi et al., "Zero Bubble Pipeline Parallelism", 2023 (arXiv 2401.10241), carried over to several stages a
rank as in torch. P = 3 ranks, m = 3 microbatches, v = 2 stages a rank, the input gradient I and the weight
gradient W as long as a forward each:

    rank 0 | 0F0 0F1 0F2 3F0 3F1 3F2 .   .   3I0 3W0 3I1 3W1 3I2 3W2 0I0 0W0 0I1 0W1 0I2 0W2
    rank 1 | .   1F0 1F1 1F2 4F0 4F1 .   4I0 4F2 4I1 4W0 4I2 4W1 1I0 4W2 1I1 1W0 1I2 1W1 1W2
    rank 2 | .   .   2F0 2F1 2F2 5F0 5I0 5F1 5I1 5F2 5I2 5W0 2I0 5W1 2I1 5W2 2I2 2W0 2W1 2W2

The groups, and the order of F_0 to F_{vm-1} and of the others, are those of `interleaved_1f1b`; the largest
group holds g. With w = P - 1 - r + (v-1) g warm-up forwards and d = r weight gradients put off on rank r:

    warm-up    F_0 ... F_{w-1}
    filling    F_{w+k} I_k                for k = 0 ... d-1
    steady     F_{w+k} I_k W_{k-d}        for k = d ... vm-w-1
    cool-down  I_k W_{k-d}                for k = vm-w ... vm-1
    rest       W_{vm-d} ... W_{vm-1}

What the warm-up of `interleaved_1f1b` has more, the put-off weights make up for, so that all ranks hold the
same. With one stage a rank the schedule is `zb_h1`.

In unit times the makespan is 3 v m + P-1, the least there is, and the bubble (P-1) / (3 v m + P-1), where
no group has less than P. The live activations are min(P + (v-1) g, v m) on every rank, with a smaller last
group at most that.
"""

from __future__ import annotations

from penstock.schedule.builders.interleaved_1f1b import existing, in_groups, microbatch_groups
from penstock.schedule.builders.one_f_one_b import turns
from penstock.schedule.ops import Op, Schedule
from penstock.schedule.placement import loop


def interleaved_zero_bubble(
    ranks: int, microbatches: int, stages_per_rank: int = 2, microbatch_group_size: int | None = None
) -> Schedule:
    placement = loop(ranks, stages_per_rank)
    groups = microbatch_groups(ranks, microbatches, microbatch_group_size)
    laps_ahead = (stages_per_rank - 1) * max(map(len, groups))

    def program(rank: int) -> tuple[Op, ...]:
        stages = placement.stages_of(rank)
        forwards, back = in_groups("F", stages, groups), stages[::-1]
        gradients, weights = in_groups("I", back, groups), in_groups("W", back, groups)
        ops = turns(forwards, gradients, ranks - 1 - rank + laps_ahead, weights, put_off=rank)
        return existing(ops, microbatches)

    programs = tuple(program(rank) for rank in range(ranks))
    return Schedule("interleaved_zero_bubble", placement, microbatches, programs)
