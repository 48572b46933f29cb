"""1F1B, and the turns of forwards and backwards that all its relatives share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, pairwise, repeat

from penstock.schedule.ops import Kind, Op, Pair, Schedule, loop


def one_f_one_b(ranks: int, microbatches: int, zero_bubble: bool = False, paired: bool = False) -> Schedule:
    """1F1B: one forward, one backward, in turn.

    Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", 2020 (arXiv 2006.09503), there called
    PipeDream-Flush. P = 3 ranks, m = 4 microbatches, a backward twice as long as a forward:

        rank 0 | F0 F1 F2 .  .  .  .  B0 B0 F3 B1 B1 .  B2 B2 .  B3 B3
        rank 1 | .  F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 .  B3 B3 .  .
        rank 2 | .  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 .  .  .  .

    With w = min(P - 1 - r, m) warm-up forwards on rank r:

        warm-up    F_0 ... F_{w-1}
        steady     F_{w+i} B_i          for i = 0 ... m-w-1
        cool-down  B_{m-w} ... B_{m-1}

    zero_bubble: each B_i becomes I_i W_i. A rank then sends its gradient before it computes that of its
    weights, and holds the same activations. `zb_h1` defers W until every rank holds as much as rank 0;
    `zb_h2` holds twice that. Both are the same turns with other numbers.

    paired: the two ops of a turn overlap: while one waits for a collective inside its layers, the other
    computes. Megatron calls this combined 1F1B. A pair starts only when the inputs of both are there, so the
    forward that feeds rank r + 1 must be a whole turn earlier. That takes twice the warm-up,
    w = min(2(P - 1 - r) + 1, m); with one turn less, neighbouring ranks would alternate instead. P = 3,
    m = 6, one column a turn:

        r = 0 | F0 F1 F2 F3    F4    F5&B0 B1    B2    B3    B4    B5
        r = 1 |    F0 F1 F2    F3&B0 F4&B1 F5&B2 B3    B4    B5
        r = 2 |       F0 F1&B0 F2&B1 F3&B2 F4&B3 F5&B4 B5

    Rank r then holds min(2(P - r), m) live activations, and the bubble is at most that of plain 1F1B.

    Plain 1F1B has GPipe's bubble, (P-1) / (m+P-1), and rank r holds min(P - r, m). Rank 0 idles for
    (P-1)(F + I + W); with zero_bubble for (P-1)(F + I), in unit times a bubble of 2(P-1) / (3m + 2(P-1)).
    """
    indices = range(microbatches)
    warm_ups = [2 * after + 1 if paired else after for after in reversed(range(ranks))]

    def program(rank: int) -> tuple[Op, ...]:
        if zero_bubble:
            return split_turns(rank, microbatches, warm_ups[rank], defer_by=0)
        return turns(row(rank, "F", indices), row(rank, "B", indices), warm_ups[rank])

    programs = tuple(program(rank) for rank in range(ranks))
    pairs = chain.from_iterable(map(_steady, programs, warm_ups))
    return Schedule("1f1b", loop(ranks), microbatches, programs, frozenset(pairs if paired else ()))


def _steady(program: tuple[Op, ...], warm_up: int) -> Iterator[Pair]:
    """The forwards after the warm-up, each with the gradient that follows it."""
    for op, following in pairwise(program):
        if op.kind == "F" and op.microbatch >= warm_up:
            yield Pair(op, following)


def split_turns(stage: int, microbatches: int, warm_up: int, defer_by: int) -> tuple[Op, ...]:
    """The program of a rank with one stage and split backwards, microbatches in order."""
    forwards, weights = row(stage, "F", range(microbatches)), row(stage, "W", range(microbatches))
    return turns(forwards, row(stage, "I", range(microbatches)), warm_up, weights, defer_by)


def turns(
    forwards: Sequence[Op],
    gradients: Sequence[Op],
    warm_up: int,
    weights: Sequence[Op] = (),
    defer_by: int = 0,
) -> tuple[Op, ...]:
    """`warm_up` forwards; then a forward and a gradient (B or I) in turn, until all are done.

    weights: the W ops, one per turn; W_k runs `defer_by` turns after its gradient, and the rest at the end
    """
    ops = [*forwards[:warm_up]]
    for turn, gradient in enumerate(gradients):
        ops += forwards[warm_up + turn : warm_up + turn + 1]
        ops.append(gradient)
        if turn >= defer_by:
            ops += weights[turn - defer_by : turn - defer_by + 1]
    ops += weights[max(0, len(gradients) - defer_by) :]
    return tuple(ops)


def row(stage: int, kind: Kind, microbatches: Iterable[int]) -> list[Op]:
    """An op for each of the microbatches. Large schedules are built of these, so that calls of Op count."""
    fields = zip(repeat(stage), repeat(kind), microbatches, strict=False)
    return [*map(partial(tuple.__new__, Op), fields)]  # in half of Op's time
