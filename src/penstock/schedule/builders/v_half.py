"""V-Half: a V of two stages a rank with half of 1F1B's memory.

Qi et al., "Pipeline Parallelism with Controllable Memory", 2024 (arXiv 2405.15362). P = 4 ranks,
m = 3 microbatches, F, I and W of equal length:

    rank 0 | 0F0 0F1 0F2 .   .   .   .   7F0 7I0 7F1 7I1 7W0 7W1 7F2 7I2 0I0 7W2 0I1 0W0 0W1 .   0I2 0W2
    rank 1 | .   1F0 1F1 .   .   .   6F0 1F2 6F1 6I0 6W0 6I1 6F2 6W1 1I0 6I2 1I1 1W0 6W2 1W1 1I2 1W2 .
    rank 2 | .   .   2F0 2F1 .   5F0 .   5F1 2F2 .   5I0 5F2 5I1 2I0 5W0 2I1 5I2 5W1 2W0 2I2 2W1 5W2 2W2
    rank 3 | .   .   .   3F0 4F0 3F1 4F1 .   .   3F2 4F2 4I0 3I0 4I1 3I1 4W0 3W0 4I2 3I2 4W1 3W1 4W2 3W2

Each microbatch follows the same block, one interval T = 6 after the one before. On rank r, with F and I of
stage r, F' and I' of stage 2P-1-r, the block begins

    F   at 2r
    F'  at 3P - 1 - r
    I'  at 3P + 2 + 2r
    I   at 6P + 1 - r

An activation that is short on the way out is long on the way home, so that all ranks hold the same. A rank
takes what the blocks have first of what is there, at most T/6 before what is not there yet; a W stands where
its rank would wait otherwise, or where it must make room.

Where `costs` are given, hops, rests and T are made of them, and other blocks are tried besides: the rest in
the middle, the pace outwards, how far to look ahead, how long to put off a W. What comes out is never slower
than the program above.

A rank holds at most min(2m, 2 floor(P/2) + 2) live activations, for any costs, and just that from m = P on:
P+2 where P is even and P+1 where it is odd, against 1F1B's 2P of this size. With equal lengths and m >= P
the step takes 6m + P - 1 + x, where x = 2P - 6 for even P and 2P - 3 for odd P, not below 0; the bubble is
1 - 6m over that.
"""

from __future__ import annotations

from penstock.schedule.builders.v_search import Shape, form
from penstock.schedule.costs import Costs
from penstock.schedule.ops import Schedule

_SHAPE = Shape(spread=2, gap=1 / 3, lead=1 / 6)


def v_half(ranks: int, microbatches: int, costs: Costs | None = None) -> Schedule:
    """`costs` lay the program out for other lengths than equal ones; see the module."""
    limits = [min(2 * microbatches, 2 * (ranks // 2) + 2)] * ranks
    return form("v_half", ranks, microbatches, limits, lambda work: _SHAPE.run(work, limits), costs)
