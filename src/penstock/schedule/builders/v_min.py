"""V-Min: a V of two stages a rank with a third of 1F1B's memory.

Qi et al., "Pipeline Parallelism with Controllable Memory", 2024 (arXiv 2405.15362). P = 3 ranks,
m = 3 microbatches, F, I and W of equal length:

    rank 0 | 0F0 0F1 .   .   .   5F0 5I0 5F1 5W0 0F2 5I1 5W1 0I0 0W0 .   5F2 5I2 0I1 5W2 0W1 .   0I2 0W2
    rank 1 | .   1F0 1F1 .   4F0 .   4F1 4I0 4W0 .   1F2 1I0 4I1 1W0 4F2 4W1 1I1 4I2 1W1 4W2 1I2 1W2 .
    rank 2 | .   .   2F0 3F0 2F1 3F1 .   .   3I0 2I0 3W0 2F2 2W0 3F2 3I1 2I1 3W1 2W1 3I2 2I2 3W2 2W2 .

Each microbatch follows the same block, one interval T = 6 after the one before. On rank r, with F and I of
stage r, F' and I' of stage 2P-1-r, the block begins

    F   at r
    F'  at 2P - 1 - r
    I'  at 2P + 7/2 + r
    I   at 4P + 5/2 - r

No microbatch could be through much sooner, and so no program without a bubble inside holds much less. A rank
takes what the blocks have first of what is there, at most T/2 before what is not there yet; a W stands where
its rank would wait otherwise, or where it must make room.

Where `costs` are given, hops, rests and T are made of them, and other blocks are tried besides: the rest in
the middle, the pace outwards, how far to look ahead, how long to put off a W. What comes out is never slower
than the program above. With little memory to spare, lengths that differ much still cost time: v_half is the
sturdier one.

A rank holds at most min(2m, 2 floor((P+1)/3) + 2) live activations, for any costs, and just that from m = P
on, against 1F1B's 2P of this size. With equal lengths and m >= P the step takes 6m + P - 1 + x, where
x = 3P - 6, 3P - 4 and 3P - 8 for P = 0, 1 and 2 modulo 3, not below 0; the bubble is 1 - 6m over that.
"""

from __future__ import annotations

from penstock.schedule.builders.v_search import Shape, form
from penstock.schedule.costs import Costs
from penstock.schedule.ops import Schedule

_SHAPE = Shape(spread=1, gap=7 / 12, lead=1 / 2)


def v_min(ranks: int, microbatches: int, costs: Costs | None = None) -> Schedule:
    """`costs` lay the program out for other lengths than equal ones; see the module."""
    limits = [min(2 * microbatches, 2 * ((ranks + 1) // 3) + 2)] * ranks
    return form("v_min", ranks, microbatches, limits, lambda work: _SHAPE.run(work, limits), costs)
