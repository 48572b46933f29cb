"""Zero-bubble schedules on a loop: ZB-H1, ZB-H2 and the interleaved one."""

from __future__ import annotations

from penstock.schedule.builders.interleaved_1f1b import existing, in_groups, microbatch_groups
from penstock.schedule.builders.one_f_one_b import split_turns, turns
from penstock.schedule.ops import Op, Schedule, loop


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """ZB-H1: split backwards, with the memory of 1F1B.

    Qi et al., "Zero Bubble Pipeline Parallelism", 2023 (arXiv 2401.10241), section 2.1. P = 3 ranks, m = 4
    microbatches, the input gradient I and the weight gradient W as long as a forward each:

        rank 0 | F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
        rank 1 | .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        rank 2 | .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

    With w = P - 1 - r warm-up forwards and d = r weight gradients deferred on rank r:

        warm-up    F_0 ... F_{w-1}
        filling    F_{w+i} I_i                for i = 0 ... d-1
        steady     F_{w+i} I_i W_{i-d}        for i = d ... m-w-1
        cool-down  I_i W_{i-d}                for i = m-w ... m-1
        rest       W_{m-d} ... W_{m-1}

    Later ranks warm up with fewer forwards and defer more weight gradients instead: all ranks hold what
    rank 0 holds in 1F1B, and the last gradient reaches rank 0 before the other ranks' last W. It is
    `interleaved_zero_bubble` with one stage per rank. torch calls it ZB1P.

    From m = P on, rank 0 idles for (P-1)(F + I - W) if W is at most F and at most I; in 1F1B for
    (P-1)(F + I + W). In unit times the makespan is 3m + P-1, the least possible, and the bubble
    (P-1) / (3m + P-1); with m < P the makespan is P-m longer. Every rank holds min(P, m) live activations.
    """
    programs = (
        split_turns(rank, microbatches, warm_up=ranks - 1 - rank, defer_by=rank) for rank in range(ranks)
    )
    return Schedule("zb_h1", loop(ranks), microbatches, tuple(programs))


def zb_h2(ranks: int, microbatches: int) -> Schedule:
    """ZB-H2: no bubble between a rank's first op and its last, for twice the memory of 1F1B.

    Qi et al., "Zero Bubble Pipeline Parallelism", 2023 (arXiv 2401.10241), section 2.2. P = 3 ranks, m = 5
    microbatches, the input gradient I and the weight gradient W as long as a forward each:

        rank 0 | F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4 .  .
        rank 1 | .  F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4 .
        rank 2 | .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4

    The phases are those of `zb_h1` with twice its numbers: w = 2(P - 1 - r) warm-up forwards, and d = 2r
    weight gradients deferred on rank r.

    Rank 0 fills its wait for the first gradient with forwards; the last rank ends with weight gradients, as
    much later than rank 0 as it began. With m < 2P-1 there are too few forwards: d is m-1-w, between r and
    2r.

    From m = 2P-1 on, no rank idles longer than (P-1)(F + I - 2W) between its first op and its last, if W is
    at most F and at most I: in unit times not at all, so that steps can follow each other without a bubble.
    One step alone takes as long as `zb_h1`: 3m + P-1 in unit times, a bubble of (P-1) / (3m + P-1), and P-m
    longer with m < P. Every rank holds min(2P-1, m) live activations.
    """

    def program(rank: int) -> tuple[Op, ...]:
        warm_up = 2 * (ranks - 1 - rank)
        defer_by = max(rank, min(2 * rank, microbatches - 1 - warm_up))
        return split_turns(rank, microbatches, warm_up, defer_by)

    return Schedule("zb_h2", loop(ranks), microbatches, tuple(program(rank) for rank in range(ranks)))


def interleaved_zero_bubble(
    ranks: int, microbatches: int, stages_per_rank: int = 2, microbatch_group_size: int | None = None
) -> Schedule:
    """Interleaved zero bubble: split backwards, with several stages per rank.

    Qi et al., "Zero Bubble Pipeline Parallelism", 2023 (arXiv 2401.10241), carried over to several stages a
    rank as in torch. P = 3 ranks, m = 3 microbatches, v = 2 stages per rank, the input gradient I and the
    weight gradient W as long as a forward each:

        rank 0 | 0F0 0F1 0F2 3F0 3F1 3F2 .   .   3I0 3W0 3I1 3W1 3I2 3W2 0I0 0W0 0I1 0W1 0I2 0W2
        rank 1 | .   1F0 1F1 1F2 4F0 4F1 .   4I0 4F2 4I1 4W0 4I2 4W1 1I0 4W2 1I1 1W0 1I2 1W1 1W2
        rank 2 | .   .   2F0 2F1 2F2 5F0 5I0 5F1 5I1 5F2 5I2 5W0 2I0 5W1 2I1 5W2 2I2 2W0 2W1 2W2

    The groups, and the order of F_0 to F_{vm-1} and of the others, are those of `interleaved_1f1b`; the
    largest group holds g. With w = P - 1 - r + (v-1) g warm-up forwards and d = r weight gradients deferred
    on rank r:

        warm-up    F_0 ... F_{w-1}
        filling    F_{w+k} I_k                for k = 0 ... d-1
        steady     F_{w+k} I_k W_{k-d}        for k = d ... vm-w-1
        cool-down  I_k W_{k-d}                for k = vm-w ... vm-1
        rest       W_{vm-d} ... W_{vm-1}

    The warm-up is shorter than that of `interleaved_1f1b` by as much as the deferred weight gradients hold,
    so that all ranks hold the same. With one stage per rank the schedule is `zb_h1`.

    In unit times the makespan is 3 v m + P-1, the least possible, and the bubble (P-1) / (3 v m + P-1), if no
    group has fewer than P. Every rank holds min(P + (v-1) g, v m) live activations, with a smaller last group
    at most that.
    """
    placement = loop(ranks, stages_per_rank)
    groups = microbatch_groups(ranks, microbatches, microbatch_group_size)
    laps_ahead = (stages_per_rank - 1) * max(map(len, groups))

    def program(rank: int) -> tuple[Op, ...]:
        stages = placement.stages_of(rank)
        forwards, back = in_groups("F", stages, groups), stages[::-1]
        gradients, weights = in_groups("I", back, groups), in_groups("W", back, groups)
        ops = turns(forwards, gradients, ranks - 1 - rank + laps_ahead, weights, defer_by=rank)
        return existing(ops, microbatches)

    programs = tuple(program(rank) for rank in range(ranks))
    return Schedule("interleaved_zero_bubble", placement, microbatches, programs)
