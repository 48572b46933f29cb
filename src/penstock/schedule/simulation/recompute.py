"""Selective recomputation: which forwards keep only their inputs and run again in the backward.

Running a forward again costs its time, so each rank recomputes no more than its memory requires: the first
microbatches in flight are recomputed and the rest are kept. Here two of at most three in flight:

    F0 F1 F2 B0 F3 B1 F4 B2 ...     0 and 1 are recomputed, 2 is kept, 3 takes the place of 0, and 4 of 1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from penstock.errors import ConfigError
from penstock.schedule.ops import Schedule
from penstock.schedule.simulation.compare import round_up
from penstock.schedule.simulation.costs import Costs, Row
from penstock.schedule.simulation.simulate import simulate
from penstock.schedule.verify import verify

Counts = int | Sequence[int] | None  # for all ranks or one per rank; None: every forward is recomputed
StageMicrobatches = frozenset[tuple[int, int]]  # stage, microbatch

_ROUNDING = 1e-9  # of sums in another order


def first_in_flight(schedule: Schedule, counts: Counts) -> StageMicrobatches:
    """The (stage, microbatch) pairs that are recomputed, if each rank recomputes its first ones in flight.

    counts: how many of a rank's live activations are recomputed: an F is if fewer than that are live and
        recomputed at its start. One number, or one per rank; None: all

    Raises ConfigError for another number of counts than ranks, or negative ones.
    """
    if not schedule.trains:
        return frozenset()
    recomputed: set[tuple[int, int]] = set()
    for program, count in zip(schedule.programs, _per_rank(counts, schedule.ranks), strict=True):
        if count in (0, inf):
            recomputed.update(
                (stage, microbatch) for stage, kind, microbatch in program if count and kind == "F"
            )
            continue
        live: set[tuple[int, int]] = set()
        for stage, kind, microbatch in program:
            if kind == "F" and len(live) < count:
                live.add((stage, microbatch))
                recomputed.add((stage, microbatch))
            elif kind in ("B", "W"):
                live.discard((stage, microbatch))
    return frozenset(recomputed)


def mixed(schedule: Schedule, kept: Costs, recomputed: Costs, places: StageMicrobatches) -> Costs:
    """The costs if the forwards of `places` are recomputed and the others are kept.

    kept: the costs without recomputation
    recomputed: the sizes of a recomputed forward: `activation` from F on, usually its inputs;
        `held_in_backward` from the start of its I or B, and `held_for_weight` after I, both as in `kept` if
        None; `held_in_forward` while F runs; and `offloaded`, the part of the activation that waits in host
        memory. Its I takes `kept.recomputed` longer; the durations here are not used
    """
    placement, microbatches = schedule.placement, schedule.microbatches

    def rows(costs: Costs, name: str) -> list[Row]:
        return costs.rows(name, placement, microbatches)

    again = [[(stage, i) in places for i in range(microbatches)] for stage in range(placement.stages)]

    def chosen(there: list[Row], elsewhere: list[Row]) -> list[Row]:
        return [
            [a if is_again else b for a, b, is_again in zip(*row, strict=True)]
            for row in zip(there, elsewhere, again, strict=True)
        ]

    def size(name: str) -> list[Row]:
        own = rows(kept if getattr(recomputed, name) is None else recomputed, name)
        return chosen(own, rows(kept, name))

    plain = (kept.held_in_forward, recomputed.held_in_forward) == (None, None)
    in_forward = None if plain else chosen(rows(recomputed, "held_in_forward"), rows(kept, "held_in_forward"))
    once, more = rows(kept, "input_grad"), rows(kept, "recomputed")
    longer = [[a + b for a, b in zip(*pair, strict=True)] for pair in zip(once, more, strict=True)]
    return replace(
        kept,
        input_grad=chosen(longer, once),
        activation=size("activation"),
        held_in_forward=in_forward,
        held_in_backward=size("held_in_backward"),
        held_for_weight=size("held_for_weight"),
        offloaded=size("offloaded") if kept.offloads or recomputed.offloads else 0.0,
    )


def counts_within(
    schedule: Schedule, kept: Costs, recomputed: Costs, limit: float | Sequence[float]
) -> tuple[int, ...]:
    """The least number of activations in flight that each rank must recompute to hold at most `limit`.

    kept, recomputed: see `mixed`
    limit: in the unit of `Costs.activation`; one number, or one per rank

    With buffers, what a rank holds depends a little on the times of other ranks; it may then be one more than
    the least. Raises ConfigError with the ranks that hold more even if all is recomputed.
    """
    limits = _limits(limit, schedule.ranks)
    proof = verify(schedule)
    most = proof.peak_live

    def peaks(counts: Counts) -> tuple[float, ...]:
        costs = mixed(schedule, kept, recomputed, first_in_flight(schedule, counts))
        return simulate(proof, costs).peak_memory

    def over(counts: Counts) -> list[bool]:
        return [peak > bound * (1 + _ROUNDING) for peak, bound in zip(peaks(counts), limits, strict=True)]

    low, high = [0] * schedule.ranks, list(most)
    if any(over(high)):
        over_limit = [
            f"rank {rank} would hold {round_up(peak)} of {limits[rank]:g}"
            for rank, (peak, too_much) in enumerate(zip(peaks(None), over(None), strict=True))
            if too_much
        ]
        raise ConfigError(
            f"a memory limit of {', '.join(f'{bound:g}' for bound in sorted(set(limits)))}",
            f"with every forward run again {', '.join(over_limit)}",
            "Take smaller microbatches, more ranks, or a schedule with fewer live activations",
        )
    while low != high:  # bisect all ranks at once: to recompute more never holds more
        middle = [(a + b) // 2 for a, b in zip(low, high, strict=True)]
        for rank, too_few in enumerate(over(middle)):
            if low[rank] == high[rank]:
                continue
            if too_few:
                low[rank] = middle[rank] + 1
            else:
                high[rank] = middle[rank]
    while any(short := over(low)):  # how long a buffer is held depends on the times of other ranks
        raised = [min(n + more, top) for n, more, top in zip(low, short, most, strict=True)]
        low = raised if raised != low else [min(n + 1, top) for n, top in zip(low, most, strict=True)]
    return tuple(low)


def _per_rank(counts: Counts, ranks: int) -> Sequence[float]:
    if counts is None:
        return [inf] * ranks
    by_rank = _one_each(counts, ranks, f"{counts!r} as counts of activations to recompute")
    if any(type(count) is not int or count < 0 for count in by_rank):
        rule = "it is how many activations in flight are recomputed, a whole number from 0 on"
        raise ConfigError(f"counts={counts!r}", rule, "Give 0 or more, or None for all")
    return by_rank


def _limits(limit: float | Sequence[float], ranks: int) -> Sequence[float]:
    by_rank = _one_each(limit, ranks, f"limit={limit!r}")
    if not all(bound >= 0 for bound in by_rank):
        raise ConfigError(f"limit={limit!r}", "it is the most that a rank may hold", "Give 0 or more")
    return by_rank


def _one_each(values: float | Sequence[float], ranks: int, shown: str) -> Sequence[float]:
    """One number per rank, from one for all or one per rank."""
    by_rank = [values] * ranks if isinstance(values, int | float) else values
    if len(by_rank) != ranks:
        raise ConfigError(
            shown, f"there are {ranks} ranks, and each takes one", f"Give one number, or {ranks}"
        )
    return by_rank
