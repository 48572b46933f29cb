"""1F1B: one forward, one backward.

Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", 2020 (arXiv 2006.09503), there called
PipeDream-Flush. P = 3 ranks, m = 4 microbatches, a backward twice as long as a forward:

    rank 0 | F0 F1 F2 .  .  .  .  B0 B0 F3 B1 B1 .  B2 B2 .  B3 B3
    rank 1 | .  F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 .  B3 B3 .  .
    rank 2 | .  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 .  .  .  .

With w = min(P - 1 - r, m) warm-up forwards on rank r:

    warm-up    F_0 ... F_{w-1}
    steady     F_{w+i} B_i          for i = 0 ... m-w-1
    cool-down  B_{m-w} ... B_{m-1}

With zero_bubble each B_i is I_i W_i in the same place. A rank then sends its gradient on before it computes
that of its weights, and its live activations stay what they were. `zb_h1` puts the W off further, until
every rank holds as much as rank 0 does; `zb_h2` holds twice that. Both are these same turns with other
numbers.

The bubble is GPipe's, (P-1) / (m+P-1); the live activations are min(P - r, m) on rank r. Rank 0 idles for
(P-1)(F + I + W), with zero_bubble for (P-1)(F + I): in unit times a bubble of 2(P-1) / (3m + 2(P-1)).
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.schedule.ops import Kind, Op, Schedule
from penstock.schedule.placement import loop


def one_f_one_b(ranks: int, microbatches: int, zero_bubble: bool = False) -> Schedule:
    def program(rank: int) -> tuple[Op, ...]:
        warm_up = ranks - 1 - rank
        if zero_bubble:
            return split_turns(rank, microbatches, warm_up, put_off=0)
        return turns(_row(rank, "F", microbatches), _row(rank, "B", microbatches), warm_up)

    return Schedule("1f1b", loop(ranks), microbatches, tuple(program(rank) for rank in range(ranks)))


def split_turns(stage: int, microbatches: int, warm_up: int, put_off: int) -> tuple[Op, ...]:
    """The program of a rank with one stage and split backwards: `turns` in the microbatches' order."""
    forwards, weights = _row(stage, "F", microbatches), _row(stage, "W", microbatches)
    return turns(forwards, _row(stage, "I", microbatches), warm_up, weights, put_off)


def turns(
    forwards: Sequence[Op],
    gradients: Sequence[Op],
    warm_up: int,
    weights: Sequence[Op] = (),
    put_off: int = 0,
) -> tuple[Op, ...]:
    """`warm_up` forwards; then a forward and a gradient (B or I) in turn, until all are done.

    weights: W, from the turn on when `put_off` of them wait; those that still wait at the end come last
    """
    ops = [*forwards[:warm_up]]
    for turn, gradient in enumerate(gradients):
        ops += forwards[warm_up + turn : warm_up + turn + 1]
        ops.append(gradient)
        if turn >= put_off:
            ops += weights[turn - put_off : turn - put_off + 1]
    ops += weights[max(0, len(gradients) - put_off) :]
    return tuple(ops)


def _row(stage: int, kind: Kind, microbatches: int) -> list[Op]:
    return [Op(stage, kind, microbatch) for microbatch in range(microbatches)]
