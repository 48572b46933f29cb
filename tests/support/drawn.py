"""What the drawings' tests draw."""

from __future__ import annotations

import random
from dataclasses import replace

from penstock.schedule import (
    Costs,
    Op,
    Pair,
    Placement,
    Reduction,
    Schedule,
    Timeline,
    both_ways,
    build,
    loop,
    simulate,
)

SECONDS = Costs(forward=0.02, input_grad=0.02, weight_grad=0.02, communication=0.0005)


def written(name: str, placement: Placement, microbatches: int, *programs: str) -> Schedule:
    """The schedule whose programs are written like the text of one, a rank a line."""
    overlaps, ops = set(), []
    for program in programs:
        ops.append(tuple[Op, ...]())
        for entry in program.split():
            pair = Pair.parse(entry)
            if pair is not None:
                overlaps.add(pair)
            ops[-1] += (Op.parse(entry),) if pair is None else tuple(pair)
    return Schedule(name, placement, microbatches, tuple(ops), frozenset(overlaps))


SPLIT = written(
    "split", loop(2), 2,
    "0F0 0F1 0I0 0W0 0I1 0W1",
    "1F0 1I0 1F1 1I1 1W0 1W1",
)  # fmt: skip

COPIES = written(
    "copies", both_ways(2), 4,
    "0F0 3F1 (0F2;3B1)OVERLAP_F_B 0B0 3F3 3B3 0B2",
    "2F1 1F0 (2F3;1B0)OVERLAP_F_B 2B1 1F2 1B2 2B3",
)  # fmt: skip

# GPipe of one microbatch, whose ranks sum the gradients of their stages as soon as they have them
REDUCED = replace(
    simulate(build("gpipe", ranks=2, microbatches=1)),
    reductions=(Reduction(0, 0, 6, 8), Reduction(1, 1, 4, 5)),
)


def jittered(timeline: Timeline, seed: int) -> Timeline:
    """As if measured: begun at 1000 and stretched a little, with ops that are a little shorter."""
    rng = random.Random(seed)
    spans = [
        span._replace(
            start=1000 + 1.05 * span.start,
            end=1000 + 1.05 * span.start + (span.end - span.start) * rng.uniform(0.9, 1),
        )
        for span in timeline.spans
    ]
    return Timeline(timeline.name, timeline.ranks, tuple(spans), timeline.peak_live)
