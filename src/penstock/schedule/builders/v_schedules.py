"""Zero-bubble schedules on a V of two stages per rank: ZB-V, V-Half and V-Min."""

from __future__ import annotations

from functools import partial

from penstock.schedule.builders.v_list import (
    BlockRule,
    TimedOrders,
    form,
    in_order,
    legs_of,
    of_the_first,
    run,
)
from penstock.schedule.dispatch import OpCosts
from penstock.schedule.ops import Schedule
from penstock.schedule.simulation.costs import Costs
from penstock.schedule.simulation.timeline import Objective


def zb_v(
    ranks: int, microbatches: int, costs: Costs | None = None, objective: Objective = "makespan"
) -> Schedule:
    """ZB-V: a V of two stages per rank and split backwards, with 1F1B's memory and no bubble inside.

    Qi et al., "Zero Bubble Pipeline Parallelism", 2023 (arXiv 2401.10241), section 6. P = 3 ranks,
    m = 3 microbatches, F, I and W of equal length:

        rank 0 | 0F0 0F1 0F2 .   .   5F0 5I0 5W0 5F1 5I1 5W1 5F2 5I2 0I0 5W2 0I1 0W0 0I2 0W1 0W2
        rank 1 | .   1F0 1F1 1F2 4F0 .   4F1 4I0 4W0 4F2 4I1 1I0 4W1 4I2 1I1 1W0 1I2 4W2 1W1 1W2
        rank 2 | .   .   2F0 3F0 2F1 3F1 2F2 3F2 3I0 2I0 3W0 3I1 2I1 2W0 3I2 2I2 3W1 2W1 3W2 2W2

    The data goes out over stages 0 ... P-1 and back over P ... 2P-1, so that each rank has one long-lived
    and one short-lived activation per microbatch. On rank r, with F and I of stage r, F' and I' of stage
    2P-1-r, each in the order of the microbatches:

        phase 1  F           2 (P-r) - 1 times
        phase 2  F' F        r times
        phase 3  F' I'       P - r times
        phase 4  F I F' I'   m - 2P + 1 + r times
        phase 5  I F' I'     P - 1 - r times
        phase 6  I I'        r times
        phase 7  I           P - r times

    With fewer than 2P - 1 microbatches the phases are those of 2P - 1 without the missing microbatches. A W
    runs where its rank would wait otherwise, or where it must free memory. With `costs`, W is placed for
    those costs and other orders are tried. The result is never longer than this program by `objective`: the
    makespan, or the extent where steps follow each other (`Timeline.extent`), as in the paper.

    With equal lengths the step takes 6m + P - 1 for m >= P, a bubble of (P-1) / (6m+P-1), all of it at the
    two ends: from m = 2P - 1 on no rank waits between its first op and its last. Rank r holds at most
    min(2P, 2m, m+1+r) live activations, for any costs.
    """
    limits = [min(2 * ranks, 2 * microbatches, microbatches + 1 + rank) for rank in range(ranks)]

    def usual(costs: OpCosts) -> TimedOrders:
        orders = [_order(ranks, costs.microbatches, rank) for rank in range(ranks)]
        return run(costs, limits, in_order(orders))

    return form("zb_v", ranks, microbatches, limits, usual, costs, objective)


def _order(ranks: int, microbatches: int, rank: int) -> list[int]:
    """The phases, without W: F, F', I' and I are legs 0, 1, 2 and 3."""
    count = max(microbatches, 2 * ranks - 1)
    legs = [0] * (2 * (ranks - rank) - 1)
    legs += [1, 0] * rank
    legs += [1, 2] * (ranks - rank)
    legs += [0, 3, 1, 2] * (count - 2 * ranks + 1 + rank)
    legs += [3, 1, 2] * (ranks - 1 - rank)
    legs += [3, 2] * rank
    legs += [3] * (ranks - rank)
    return [*of_the_first(microbatches, map(legs_of(ranks, rank).__getitem__, legs))]


_V_HALF = BlockRule(spread=2, gap=1 / 3, lead=1 / 6)


def v_half(
    ranks: int, microbatches: int, costs: Costs | None = None, objective: Objective = "makespan"
) -> Schedule:
    """V-Half: a V of two stages per rank with half of 1F1B's memory.

    Qi et al., "Pipeline Parallelism with Controllable Memory", 2024 (arXiv 2405.15362). P = 4 ranks, m = 3
    microbatches, F, I and W of equal length:

        rank 0 | 0F0 0F1 0F2 .   .   .   .   7F0 7I0 7F1 7I1 7W0 7W1 7F2 7I2 0I0 7W2 0I1 0W0 0W1 .   0I2 0W2
        rank 1 | .   1F0 1F1 .   .   .   6F0 1F2 6F1 6I0 6W0 6I1 6F2 6W1 1I0 6I2 1I1 1W0 6W2 1W1 1I2 1W2 .
        rank 2 | .   .   2F0 2F1 .   5F0 .   5F1 2F2 .   5I0 5F2 5I1 2I0 5W0 2I1 5I2 5W1 2W0 2I2 2W1 5W2 2W2
        rank 3 | .   .   .   3F0 4F0 3F1 4F1 .   .   3F2 4F2 4I0 3I0 4I1 3I1 4W0 3W0 4I2 3I2 4W1 3W1 4W2 3W2

    All microbatches follow one pattern, the block. Each starts one interval, T = 6, after the previous one.
    On rank r, with F and I of stage r, F' and I' of stage 2P-1-r, the ops of the block start

        F   at 2r
        F'  at 3P - 1 - r
        I'  at 3P + 2 + 2r
        I   at 6P + 1 - r

    The lifetimes of a rank's two activations of a microbatch add up to the same on every rank, so all ranks
    hold the same. Of the ops that are ready, a rank takes the one with the earliest time in its block,
    unless another op that is not ready yet is more than T/6 earlier. A W runs where its rank would wait
    otherwise, or where it must free memory.

    With `costs`, the block and T follow from them. Other blocks are tried too, with another pause in the
    middle, another pace outwards, another look-ahead, and later W. The result is never longer than this
    program by `objective`, the makespan or the extent.

    A rank holds at most min(2m, 2 floor(P/2) + 2) live activations, for any costs, and exactly that from
    m = P on: P+2 for even P and P+1 for odd P, where 1F1B holds 2P of this size. With equal lengths and
    m >= P the step takes 6m + P - 1 + x, with x = 2P - 6 for even P and 2P - 3 for odd P, but at least 0; the
    bubble is 1 - 6m / (6m + P - 1 + x).
    """
    limits = [min(2 * microbatches, 2 * (ranks // 2) + 2)] * ranks
    return form(
        "v_half",
        ranks,
        microbatches,
        limits,
        partial(_V_HALF.run, limits=limits),
        costs,
        objective,
    )


_V_MIN = BlockRule(spread=1, gap=7 / 12, lead=1 / 2)


def v_min(
    ranks: int, microbatches: int, costs: Costs | None = None, objective: Objective = "makespan"
) -> Schedule:
    """V-Min: a V of two stages per rank with a third of 1F1B's memory.

    Qi et al., "Pipeline Parallelism with Controllable Memory", 2024 (arXiv 2405.15362). P = 3 ranks, m = 3
    microbatches, F, I and W of equal length:

        rank 0 | 0F0 0F1 .   .   .   5F0 5I0 5F1 5W0 0F2 5I1 5W1 0I0 0W0 .   5F2 5I2 0I1 5W2 0W1 .   0I2 0W2
        rank 1 | .   1F0 1F1 .   4F0 .   4F1 4I0 4W0 .   1F2 1I0 4I1 1W0 4F2 4W1 1I1 4I2 1W1 4W2 1I2 1W2 .
        rank 2 | .   .   2F0 3F0 2F1 3F1 .   .   3I0 2I0 3W0 2F2 2W0 3F2 3I1 2I1 3W1 2W1 3I2 2I2 3W2 2W2 .

    All microbatches follow one block, as in `v_half`. On rank r its ops start

        F   at r
        F'  at 2P - 1 - r
        I'  at 2P + 7/2 + r
        I   at 4P + 5/2 - r

    Hardly any block is shorter, so no program without a bubble inside holds much less. Ready ops are taken as
    in `v_half`, with a look-ahead of T/2 in place of T/6.

    With `costs`, the block and T follow from them and other blocks are tried, as for `v_half`; the result is
    never longer than this program by `objective`. With so little memory, lengths that differ much still cost
    time: `v_half` suffers less.

    A rank holds at most min(2m, 2 floor((P+1)/3) + 2) live activations, for any costs, and exactly that from
    m = P on, where 1F1B holds 2P of this size. With equal lengths and m >= P the step takes 6m + P - 1 + x,
    with x = 3P - 6, 3P - 4 and 3P - 8 for P = 0, 1 and 2 modulo 3, but at least 0; the bubble is
    1 - 6m / (6m + P - 1 + x).
    """
    limits = [min(2 * microbatches, 2 * ((ranks + 1) // 3) + 2)] * ranks
    return form("v_min", ranks, microbatches, limits, partial(_V_MIN.run, limits=limits), costs, objective)
