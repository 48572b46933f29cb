"""A V schedule formed for given costs: the best of many repeating blocks, never worse than the usual one."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice, product
from math import inf
from typing import NamedTuple

from penstock.schedule.builders.v_list import Block, ByBlock, InOrder, Run, Work, run, schedule
from penstock.schedule.costs import Costs
from penstock.schedule.ops import Schedule

_BUDGET = 250_000  # ops that the search may simulate: half a second


class Shape(NamedTuple):
    """spread, gap: see Block; lead: see ByBlock, in intervals; patience: see run."""

    spread: float
    gap: float
    lead: float
    patience: float = 0.0

    def run(self, work: Work, limits: Sequence[int]) -> Run:
        block = Block.of(work, self.spread, self.gap)
        rule = ByBlock(block, work.microbatches, self.lead * work.interval)
        found = run(work, limits, rule, self.patience)
        if found.makespan < inf or self.lead == inf:
            return found
        return self._replace(lead=inf).run(work, limits)  # no rank gets stuck that may look ahead without end


_SPREADS = (1.0, 2.0)
_GAPS = (0.0, 1 / 6, 1 / 3, 1 / 2, 2 / 3)
_LEADS = (0.0, 1 / 6, 1 / 3, 1 / 2, 1.0, 2.0, 4.0, inf)
_PATIENCES = (0.0, 0.5, 1.0)
_SHAPES = tuple(Shape(*knobs) for knobs in product(_SPREADS, _GAPS, _LEADS, _PATIENCES))


def form(
    name: str,
    ranks: int,
    microbatches: int,
    limits: Sequence[int],
    usual: Callable[[Work], Run],
    costs: Costs | None,
) -> Schedule:
    """What `usual` makes for unit times; where `costs` are given, a better schedule for them if there is one.

    limits[r]: the most live activations of rank r, whatever the costs
    """
    unit = Work.of(ranks, microbatches, Costs())
    chosen = usual(unit)
    if costs is not None:
        work = Work.of(ranks, microbatches, costs)
        order = InOrder([[slot for slot, _ in slots] for slots in chosen.programs])
        as_usual = run(work, limits, order, patience=None)
        own = _search(work, [usual, *_candidates(limits, chosen)])(work)
        chosen = min(as_usual, own, key=lambda found: found.makespan)
    return schedule(name, unit, chosen.programs)


def _search(work: Work, candidates: Iterable[Callable[[Work], Run]]) -> Callable[[Work], Run]:
    """What does best on the first microbatches: enough for all phases, few enough to try many."""
    sample = work.first(2 * work.ranks + 4)
    affordable = max(1, _BUDGET // (6 * sample.ranks * sample.microbatches))
    return min(islice(candidates, affordable), key=lambda candidate: candidate(sample).makespan)


def _candidates(limits: Sequence[int], usual: Run) -> Iterator[Callable[[Work], Run]]:
    """The usual order of the legs, W where these costs leave time for it; then blocks in a fixed disorder."""

    def in_order(work: Work, patience: float) -> Run:
        legs = [[slot for slot, i in slots if slot < 4 and i < work.microbatches] for slots in usual.programs]
        return run(work, limits, InOrder(legs), patience)

    for patience in (0.0, 0.5, 1.0):
        yield partial(in_order, patience=patience)
    for shape in random.Random(0).sample(_SHAPES, len(_SHAPES)):
        yield partial(shape.run, limits=limits)
