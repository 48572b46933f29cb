"""The balanced split: the slowest rank becomes as fast as possible, under a memory limit.

It is exact if each rank has one stage; if ranks have several, it is a local search from two exact splits.

numpy is imported by what needs it: a config is read before it is known how many threads numpy may have.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from penstock.errors import ConfigError, PartitionError

if TYPE_CHECKING:
    from penstock.schedule.op_arrays import Integers


def ranges(counts: Sequence[int]) -> list[range]:
    """The layers of each stage, from their numbers."""
    return [range(start, end) for start, end in pairwise(accumulate(counts, initial=0))]


@dataclass(frozen=True)
class LayerCosts:
    """The cost of each layer, and of embedding and head, in any one unit: milliseconds, parameters."""

    layers: Sequence[float]
    embedding: float = 0
    head: float = 0


def as_layer_costs(costs: LayerCosts | Sequence[float], layers: int) -> LayerCosts:
    """LayerCosts from bare numbers for each of `layers` layers. Raises ConfigError for another count."""
    costs = costs if isinstance(costs, LayerCosts) else LayerCosts(costs)
    if len(costs.layers) != layers:
        rule = f"the model has {layers} layers, and each has one"
        raise ConfigError(f"costs of {len(costs.layers)} layers", rule, f"Give {layers}")
    return costs


@dataclass(frozen=True)
class Memory:
    """The memory of layers, and the limit of a stage, in one unit, e.g. bytes.

    limit: for one stage. Stages that share a rank divide the rank's memory.
    weights: of each layer, with gradients and optimizer state
    activations: of each layer, for one live microbatch; empty counts none
    live: for each stage, the microbatches that are live at its peak; empty counts one for all
    embedding, head: weights and activations of the modules before and after the layers
    """

    limit: float
    weights: Sequence[float]
    activations: Sequence[float] = ()
    live: Sequence[int] = ()
    embedding: tuple[float, float] = (0, 0)
    head: tuple[float, float] = (0, 0)


# (stage, first layer, layer after the last): the cost of that stage, or the memory that it holds
Holders = Sequence[Sequence[int]]  # for each stage, the ranks that have it or a copy of it
_StageSum = Callable[[int, int, int], int]
_StageTest = Callable[[int, int, int], bool]


def balanced_split(
    costs: LayerCosts,
    stages: int,
    *,
    memory: Memory | None = None,
    holders: Holders | None = None,
) -> list[range]:
    """Split the layers so that the costliest stage, or rank, costs the least possible.

    Among several such splits take the one with the least sum of squared stage costs, then the one whose
    later stages have more layers: most schedules hold fewer microbatches there. A stage stays empty where
    embedding or head alone cost more than the other stages do. The sums are exact, not rounded.

    If ranks have several stages, layers then move from stage to stage as long as this lowers the cost of the
    slowest rank, whose compute time is about that of a step. The result may not be the best of all splits.

    Args:
        costs: of each layer, of the embedding on the first stage and of the head on the last
        memory: a limit for every stage; None: no limit.
        holders: the ranks that have each stage; None gives each stage a rank of its own.

    Raises:
        ConfigError: a cost is not a finite number of 0 or more.
        PartitionError: no split keeps the memory limit.
    """
    if stages < 1:
        raise ConfigError(f"stages={stages}", "a model has at least one", "Give 1 or more")
    _check_numbers(costs, memory, stages)
    layers = len(costs.layers)
    cost = _stage_sums(_as_integers((*costs.layers, costs.embedding, costs.head))[0], stages)
    held: _StageSum = lambda stage, start, end: 0  # noqa: E731
    limit = 0
    if memory is not None:
        held, unit = _held(memory, stages)
        limit = math.floor(Fraction(memory.limit) * unit)
        least = _least_limit(held, lambda *_: True, stages, layers)
        if least > limit:
            raise _too_large(memory, stages, Fraction(least, unit))

    def has_room(stage: int, start: int, end: int) -> bool:
        return held(stage, start, end) <= limit

    slowest = _least_limit(cost, has_room, stages, layers)
    split = _least_squares(cost, slowest, has_room, stages, layers)
    hosts = [rank for ranks in holders or () for rank in ranks]
    one_each = len(set(hosts)) == len(hosts)
    test = None if memory is None else has_room
    return split if holders is None or one_each else _even_ranks(split, cost, test, holders)


def _even_ranks(
    split: list[range], cost: _StageSum, has_room: _StageTest | None, holders: Holders
) -> list[range]:
    """The better of two local optima: one from `split`, one from a split of layers that cost the same."""
    stages, layers = len(split), split[-1].stop
    mean = cost(0, 0, layers) - cost(0, 0, 0)  # the cost of a layer, times `layers`
    costs = [layers * cost(stage, 0, 0) for stage in range(stages)]
    counts = [0] * stages
    for _ in range(layers):  # to the cheapest stage of the cheapest rank
        of_rank = _by_rank(costs, holders)
        stage = min(range(stages), key=lambda s: (max(of_rank[rank] for rank in holders[s]), costs[s]))
        counts[stage] += 1
        costs[stage] += mean
    starts = [split, ranges(counts)]
    fitting = [start for start in starts if _fits(start, has_room)]
    return min((_moved(start, cost, has_room, holders) for start in fitting), key=itemgetter(0))[1]


# moves of a cut, in layers; with steps of only one layer, the result is over 2 % worse than the best split
_STEPS = (-8, -5, -4, -3, -2, -1, 1, 2, 3, 4, 5, 8)


def _moved(
    split: list[range], cost: _StageSum, has_room: _StageTest | None, holders: Holders
) -> tuple[tuple[int, ...], list[range]]:
    """Move layers off the slowest rank until no move helps. Returns the split, and its quality.

    A move shifts one or two ends of the slowest rank's stages, or gives one of its layers to any stage, where
    the stages in between pass one layer on.
    """
    import numpy as np

    judge = _Judge.of(cost, split[-1].stop, holders)
    cuts = np.array([0, *(layers.stop for layers in split)])
    best = judge.qualities(cuts[None])[0]
    while True:
        moves = _moves(cuts, judge.slowest(cuts), holders)
        moves = moves[judge.costs(moves)[1].max(-1) <= best[0]]
        qualities = judge.qualities(moves)
        better = (at for at in sorted(range(len(moves)), key=qualities.__getitem__) if qualities[at] < best)
        fitting = (at for at in better if _fits(_as_ranges(moves[at]), has_room))
        if (chosen := next(fitting, None)) is None:
            return best, _as_ranges(cuts)
        cuts, best = moves[chosen], qualities[chosen]


def _moves(cuts: Integers, slowest: int, holders: Holders) -> Integers:
    """A row of cuts for each move off a rank. cuts: 0, then the layer after the last of each stage"""
    import numpy as np

    ends = [cut for cut in range(1, len(holders)) if slowest in (*holders[cut - 1], *holders[cut])]
    first, step, second, other = (
        grid.ravel() for grid in np.meshgrid(ends, _STEPS, ends, (0, *_STEPS), indexing="ij")
    )
    shifted = np.repeat(cuts[None], len(first), axis=0)
    row = np.arange(len(first))
    shifted[row, first] += step
    shifted[row, second] += other
    in_order = np.ones(len(first), bool)
    for end in (first, second):
        before, there, behind = (shifted[row, end + by] for by in (-1, 0, 1))
        in_order &= (before <= there) & (there <= behind)
    counts = np.diff(cuts)
    sources = [stage for stage, ranks in enumerate(holders) if slowest in ranks and counts[stage]]
    source, target = (grid.ravel() for grid in np.meshgrid(sources, range(len(holders)), indexing="ij"))
    at = np.arange(len(cuts))
    given = np.where(source[:, None] < at, -1, 0) + np.where(target[:, None] < at, 1, 0)
    return np.concatenate([shifted[in_order], (cuts + given)[source != target]])


class _Judge(NamedTuple):
    """Judges many splits at once, each a row of cuts.

    until: the cost of all layers before each; ends: of the embedding and the head, by stage
    of_rank: 1 where a rank holds a stage
    """

    until: Integers
    ends: Integers
    of_rank: Integers

    @classmethod
    def of(cls, cost: _StageSum, layers: int, holders: Holders) -> _Judge:
        import numpy as np

        ends = [cost(stage, 0, 0) for stage in range(len(holders))]
        until = [cost(0, 0, end) - ends[0] for end in range(layers + 1)]
        count = 1 + max(rank for ranks in holders for rank in ranks)
        of_rank = [[int(rank in ranks) for rank in range(count)] for ranks in holders]
        largest = len(holders) * (count * (until[-1] + sum(ends))) ** 2
        dtype = np.int64 if largest < 2**63 else object  # Python's own integers have no limit
        return cls(np.array(until, dtype), np.array(ends, dtype), np.array(of_rank, dtype))

    def costs(self, cuts: Integers) -> tuple[Integers, Integers]:
        """Of the stages, and of the ranks."""
        of_stage = self.until[cuts[..., 1:]] - self.until[cuts[..., :-1]] + self.ends
        return of_stage, of_stage @ self.of_rank

    def slowest(self, cuts: Integers) -> int:
        return int(self.costs(cuts)[1].argmax())

    def qualities(self, cuts: Integers) -> list[tuple[int, ...]]:
        """The largest cost of a rank, the sum of their squares, and the same of stages: less is better."""
        of_stage, of_rank = self.costs(cuts)
        rows = [row for costs in (of_rank, of_stage) for row in (costs.max(-1), (costs * costs).sum(-1))]
        return list(zip(*(row.tolist() for row in rows), strict=True))


def _as_ranges(cuts: Integers) -> list[range]:
    return [range(start, end) for start, end in pairwise(cuts.tolist())]


def _fits(split: Sequence[range], has_room: _StageTest | None) -> bool:
    """has_room: None where nothing limits a stage"""
    if has_room is None:
        return True
    return all(has_room(stage, layers.start, layers.stop) for stage, layers in enumerate(split))


def _by_rank(costs: Sequence[int], holders: Holders) -> dict[int, int]:
    """The sum of the stages' costs for each rank."""
    total: defaultdict[int, int] = defaultdict(int)
    for ranks, cost in zip(holders, costs, strict=True):
        for rank in ranks:
            total[rank] += cost
    return total


def _check_numbers(costs: LayerCosts, memory: Memory | None, stages: int) -> None:
    named = {"costs": list(costs.layers), "costs.embedding and costs.head": [costs.embedding, costs.head]}
    if memory is not None:
        named |= {"memory.weights": list(memory.weights), "memory.activations": list(memory.activations),
                  "memory.live": list(memory.live), "memory.limit": [memory.limit],
                  "memory.embedding": list(memory.embedding), "memory.head": list(memory.head)}  # fmt: skip
        for name, wanted in (
            ("weights", len(costs.layers)), ("activations", len(costs.layers)), ("live", stages)
        ):  # fmt: skip
            count = len(getattr(memory, name))
            if count != wanted and (count or name == "weights"):
                unit = "stage" if name == "live" else "layer"
                rule = f"there is one for each {unit}, so {wanted}"
                raise ConfigError(f"memory.{name} of {count} numbers", rule, f"Give {wanted}")
    for name, numbers in named.items():
        for number in numbers:
            if not (math.isfinite(number) and number >= 0):
                rule = "each is a finite number of 0 or more"
                raise ConfigError(f"{name} with {number}", rule, "Measure it again")


def _as_integers(numbers: Sequence[float]) -> tuple[list[int], int]:
    """The numbers as multiples of one small unit, and the number of units in 1.

    A float is a fraction. Sums of integers are exact, so equal splits compare equal.
    """
    exact = [Fraction(number) for number in numbers]
    unit = math.lcm(*(number.denominator for number in exact))
    return [int(number * unit) for number in exact], unit


def _stage_sums(numbers: Sequence[int], stages: int) -> _StageSum:
    """Sums over the layers of a stage. numbers: of each layer, then of the embedding and of the head"""
    *layers, embedding, head = numbers
    until = list(accumulate(layers, initial=0))

    def total(stage: int, start: int, end: int) -> int:
        at_the_ends = (embedding if stage == 0 else 0) + (head if stage == stages - 1 else 0)
        return until[end] - until[start] + at_the_ends

    return total


def _held(memory: Memory, stages: int) -> tuple[_StageSum, int]:
    """The memory of a stage in small units, and the number of units in 1."""
    live, parts = _as_integers(memory.live or [1] * stages)
    activations = memory.activations or [0] * len(memory.weights)
    weights = (*memory.weights, memory.embedding[0], memory.head[0])
    sizes, unit = _as_integers((*weights, *activations, memory.embedding[1], memory.head[1]))
    fixed = _stage_sums([parts * size for size in sizes[: len(weights)]], stages)
    per_microbatch = _stage_sums(sizes[len(weights) :], stages)

    def held(stage: int, start: int, end: int) -> int:
        return fixed(stage, start, end) + live[stage] * per_microbatch(stage, start, end)

    return held, parts * unit


def _least_limit(total: _StageSum, allowed: Callable[[int, int, int], bool], stages: int, layers: int) -> int:
    """The least limit for which some split keeps every stage's `total` within it. Some split is allowed.

    A limit can be kept if the layers suffice for no further stage when every stage takes as many as it may: a
    stage that starts later, or ends earlier, never costs more and never takes more memory.
    """

    def can_be_kept(limit: int) -> bool:
        start = 0
        for stage in range(stages):
            ends = range(start, layers + 1)
            fitting = bisect_left(
                ends,
                True,
                key=lambda end: total(stage, start, end) > limit or not allowed(stage, start, end),
            )
            if not fitting:  # the embedding or the head alone is too much
                return False
            start = ends[fitting - 1]
        return start == layers

    low, high = 0, max(total(stage, 0, layers) for stage in range(stages))
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if can_be_kept(middle) else (middle + 1, high)
    return low


def _least_squares(
    cost: _StageSum, slowest: int, allowed: Callable[[int, int, int], bool], stages: int, layers: int
) -> list[range]:
    """Among the splits in which no stage costs more than `slowest`, the one with the least sum of squares.

    best[stage][start]: the least sum of squares over `stage` and those after it, which begin at layer
    `start`, and the layer after the last of `stage`: smaller is better in both
    """
    best: list[dict[int, tuple[int, int]]] = [{} for _ in range(stages)] + [{layers: (0, 0)}]
    for stage in reversed(range(stages)):
        here = best[stage]
        for end, (rest, _) in best[stage + 1].items():
            for start in range(end, -1, -1):
                own = cost(stage, start, end)
                if own > slowest or not allowed(stage, start, end):
                    break
                candidate = (own * own + rest, end)
                here[start] = min(candidate, here.get(start, candidate))
    cuts = [0]
    for stage in range(stages):
        cuts.append(best[stage][cuts[-1]][1])
    return [range(start, end) for start, end in pairwise(cuts)]


def _too_large(memory: Memory, stages: int, needed: Fraction) -> PartitionError:
    shown = int(needed) if needed.denominator == 1 else float(needed)
    return PartitionError(
        f"memory.limit={memory.limit:,} for {len(memory.weights)} layers on {stages} stages",
        f"however the layers are split, some stage holds {shown:,} or more",
        f"Give {shown:,} or more, or use more stages",
    )
