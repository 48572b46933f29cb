"""ZB-V: a V of two stages a rank and split backwards, with 1F1B's memory and no bubble inside.

Qi et al., "Zero Bubble Pipeline Parallelism", 2023 (arXiv 2401.10241), section 6. P = 3 ranks,
m = 3 microbatches, F, I and W of equal length:

    rank 0 | 0F0 0F1 0F2 .   .   5F0 5I0 5W0 5F1 5I1 5W1 5F2 5I2 0I0 5W2 0I1 0W0 0I2 0W1 0W2
    rank 1 | .   1F0 1F1 1F2 4F0 .   4F1 4I0 4W0 4F2 4I1 1I0 4W1 4I2 1I1 1W0 1I2 4W2 1W1 1W2
    rank 2 | .   .   2F0 3F0 2F1 3F1 2F2 3F2 3I0 2I0 3W0 3I1 2I1 2W0 3I2 2I2 3W1 2W1 3W2 2W2

The data goes out over stages 0 ... P-1 and home over P ... 2P-1, so that a rank holds the longest and the
shortest lived activations together. On rank r, with F and I of stage r, F' and I' of stage 2P-1-r, each in
the order of the microbatches:

    phase 1  F           2 (P-r) - 1 times
    phase 2  F' F        r times
    phase 3  F' I'       P - r times
    phase 4  F I F' I'   m - 2P + 1 + r times
    phase 5  I F' I'     P - 1 - r times
    phase 6  I I'        r times
    phase 7  I           P - r times

With less than 2P - 1 microbatches the phases are those of 2P - 1, less what the later ones do. A W stands
where its rank would wait otherwise, or where it must make room. Where `costs` are given, W is placed for
them and other orders are tried besides; what comes out is never slower than the usual program.

With equal lengths the step takes 6m + P - 1 for m >= P, a bubble of (P-1) / (6m+P-1), all of it at the two
ends: from m = 2P - 1 on no rank waits between its first op and its last. Rank r holds
min(2P, 2m, m+1+r) live activations, for any costs no more.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.schedule.builders.v_list import InOrder, Run, Work, run
from penstock.schedule.builders.v_search import form
from penstock.schedule.costs import Costs
from penstock.schedule.ops import Schedule


def zb_v(ranks: int, microbatches: int, costs: Costs | None = None) -> Schedule:
    """`costs` lay the program out for other lengths than equal ones; see the module."""
    limits = [min(2 * ranks, 2 * microbatches, microbatches + 1 + rank) for rank in range(ranks)]

    def usual(work: Work) -> Run:
        return run(work, limits, InOrder([_legs(ranks, work.microbatches, rank) for rank in range(ranks)]))

    return form("zb_v", ranks, microbatches, limits, usual, costs)


def _legs(ranks: int, microbatches: int, rank: int) -> list[int]:
    """The order of the phases: F, F', I' and I are legs 0, 1, 2 and 3."""
    count = max(microbatches, 2 * ranks - 1)
    legs = [0] * (2 * (ranks - rank) - 1)
    legs += [1, 0] * rank
    legs += [1, 2] * (ranks - rank)
    legs += [0, 3, 1, 2] * (count - 2 * ranks + 1 + rank)
    legs += [3, 1, 2] * (ranks - 1 - rank)
    legs += [3, 2] * rank
    legs += [3] * (ranks - rank)
    return list(_of_the_first(legs, microbatches))


def _of_the_first(legs: list[int], microbatches: int) -> Iterator[int]:
    """Leaves out the legs of further microbatches."""
    reached = [0] * 4
    for leg in legs:
        if reached[leg] < microbatches:
            yield leg
        reached[leg] += 1
