"""The balanced split: contiguous layers for each stage, so that the slowest stage is as fast as can be."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise

from penstock.errors import ConfigError, PartitionError

# of (stage, first layer, layer after the last): what that stage costs or holds
_Sum = Callable[[int, int, int], int]
# of (stage, layer after the last): the first layer that the stage may start with
_Starts = Callable[[int, int], int]


@dataclass(frozen=True)
class LayerCosts:
    """What each layer costs, and what embedding and head do, in any one unit: milliseconds, parameters."""

    layers: Sequence[float]
    embedding: float = 0
    head: float = 0


def as_layer_costs(given: LayerCosts | Sequence[float], layers: int) -> LayerCosts:
    """`given`, of a model with that many layers; mere numbers are the layers' own. Raises ConfigError."""
    costs = given if isinstance(given, LayerCosts) else LayerCosts(given)
    if len(costs.layers) != layers:
        rule = f"the model has {layers} layers, and each has one"
        raise ConfigError(f"costs of {len(costs.layers)} layers", rule, f"Give {layers}")
    return costs


@dataclass(frozen=True)
class Memory:
    """What stages hold and how much they may. All numbers are in one unit, bytes for instance.

    limit: what one stage may hold. Where several share a rank, that is the rank's memory divided by them.
    weights: of each layer, together with what lies beside them: gradients, optimizer state
    activations: of each layer, for one live microbatch; empty counts none
    live: for each stage, how many microbatches are live at its peak; empty counts one for all
    embedding, head: weights and activations of what stands on the first and on the last stage
    """

    limit: float
    weights: Sequence[float]
    activations: Sequence[float] = ()
    live: Sequence[int] = ()
    embedding: tuple[float, float] = (0, 0)
    head: tuple[float, float] = (0, 0)


def balanced_split(
    costs: Sequence[float],
    stages: int,
    *,
    embedding_cost: float = 0,
    head_cost: float = 0,
    memory: Memory | None = None,
) -> list[range]:
    """The layers of each stage, so that the costliest stage costs the least that is possible.

    costs: of each layer, in any unit; embedding_cost is on the first stage, head_cost on the last. Of several
    such splits it is the one with the least sum of the stages' squared costs, and of those the one whose
    earlier stages have more layers. So a stage is left without layers where embedding or head alone cost as
    much as others do. Exact: the sums are not rounded.

    Raises ConfigError for a cost that is no finite number of 0 or more, PartitionError where no split fits
    into the memory.
    """
    if stages < 1:
        raise ConfigError(f"stages={stages}", "a model has one at least", "Give 1 or more")
    _check(costs, (embedding_cost, head_cost), memory, stages)
    cost = _sums(_whole((*costs, embedding_cost, head_cost))[0], stages)
    starts = _all_fit if memory is None else _within(memory, stages)
    slowest = _least_maximum(cost, starts, stages, len(costs))
    if slowest is None:
        assert memory is not None
        raise _too_large(memory, stages)
    return _even_most(cost, starts, slowest, stages, len(costs))


def _check(costs: Sequence[float], ends: Sequence[float], memory: Memory | None, stages: int) -> None:
    named = {"costs": list(costs), "embedding_cost and head_cost": list(ends)}
    if memory is not None:
        named |= {"memory.weights": list(memory.weights), "memory.activations": list(memory.activations),
                  "memory.live": list(memory.live), "memory.limit": [memory.limit],
                  "memory.embedding": list(memory.embedding), "memory.head": list(memory.head)}  # fmt: skip
        for name, wanted in (("weights", len(costs)), ("activations", len(costs)), ("live", stages)):
            given = len(getattr(memory, name))
            if given != wanted and (given or name == "weights"):
                of = "stage" if name == "live" else "layer"
                rule = f"there is one for each {of}, so {wanted}"
                raise ConfigError(f"memory.{name} of {given} numbers", rule, f"Give {wanted}")
    for name, numbers in named.items():
        for number in numbers:
            if not (math.isfinite(number) and number >= 0):
                rule = "each is a finite number of 0 or more"
                raise ConfigError(f"{name} with {number}", rule, "Measure it again")


def _whole(numbers: Sequence[float]) -> tuple[list[int], int]:
    """The numbers in whole multiples of one small unit, and how many of those make 1.

    A float is a fraction. In whole numbers sums are exact, so that equal splits are found equal.
    """
    exact = [Fraction(number) for number in numbers]
    unit = math.lcm(*(number.denominator for number in exact))
    return [int(number * unit) for number in exact], unit


def _sums(parts: Sequence[int], stages: int) -> _Sum:
    """parts: of each layer, then of the embedding and of the head."""
    *layers, first, last = parts
    until = list(accumulate(layers, initial=0))

    def total(stage: int, start: int, end: int) -> int:
        at_the_ends = (first if stage == 0 else 0) + (last if stage == stages - 1 else 0)
        return until[end] - until[start] + at_the_ends

    return total


def _held(memory: Memory, stages: int) -> tuple[_Sum, int]:
    """What a stage holds, in whole numbers, and how many of those make 1."""
    live = memory.live or [1] * stages
    activations = memory.activations or [0] * len(memory.weights)
    weights = (*memory.weights, memory.embedding[0], memory.head[0])
    saved = (*activations, memory.embedding[1], memory.head[1])
    whole, unit = _whole((*weights, *saved))
    fixed, each = _sums(whole[: len(weights)], stages), _sums(whole[len(weights) :], stages)
    return lambda stage, start, end: fixed(stage, start, end) + live[stage] * each(stage, start, end), unit


def _all_fit(stage: int, end: int) -> int:
    return 0


def _within(memory: Memory, stages: int) -> _Starts:
    held, unit = _held(memory, stages)
    limit = math.floor(Fraction(memory.limit) * unit)

    def starts(stage: int, end: int) -> int:
        # what a stage holds falls as it starts later; beyond `end` where not even no layer fits
        return bisect_left(range(end + 1), True, key=lambda start: held(stage, start, end) <= limit)

    return starts


def _least_maximum(cost: _Sum, starts: _Starts, stages: int, layers: int) -> int | None:
    """The cost of the costliest stage in the best split; None where no split fits.

    best[end]: that of the first `end` layers on the stages so far, for as many as fit. It grows with `end`
    (take layers away, and no stage costs or holds more), while the last of these stages costs the less the
    later it starts: so the least of the larger of the two is where they cross.
    """
    best = [0]
    for stage in range(stages):
        following: list[int] = []
        for end in range(layers + 1):
            low, high = starts(stage, end), min(end, len(best) - 1)
            if low > high:
                break
            at = bisect_left(range(high + 1), True, low, key=_crossed(best, cost, stage, end))
            near = [start for start in (at - 1, at) if low <= start <= high]
            following.append(min(max(best[start], cost(stage, start, end)) for start in near))
        best = following
    return best[layers] if len(best) > layers else None


def _crossed(best: Sequence[int], cost: _Sum, stage: int, end: int) -> Callable[[int], bool]:
    return lambda start: best[start] >= cost(stage, start, end)


def _even_most(cost: _Sum, starts: _Starts, slowest: int, stages: int, layers: int) -> list[range]:
    """Of the splits in which no stage costs more than `slowest`, the one with the least sum of squares.

    least[stage][start]: the least sum of squares over `stage` and those after it, from layer `start` on, and
    minus the layer after the last of `stage`: smaller is better in both
    """
    least: list[dict[int, tuple[int, int]]] = [{} for _ in range(stages)] + [{layers: (0, 0)}]
    for stage in reversed(range(stages)):
        here = least[stage]
        for end, (rest, _) in least[stage + 1].items():
            for start in range(end, starts(stage, end) - 1, -1):
                own = cost(stage, start, end)
                if own > slowest:
                    break
                found = (own * own + rest, -end)
                here[start] = min(found, here.get(start, found))
    cuts = [0]
    for stage in range(stages):
        cuts.append(-least[stage][cuts[-1]][1])
    return [range(start, end) for start, end in pairwise(cuts)]


def _too_large(memory: Memory, stages: int) -> PartitionError:
    held, unit = _held(memory, stages)
    needed = _least_maximum(held, _all_fit, stages, len(memory.weights))
    assert needed is not None
    exact = Fraction(needed, unit)
    shown = int(exact) if exact.denominator == 1 else float(exact)
    return PartitionError(
        f"memory.limit={memory.limit:,} for {len(memory.weights)} layers on {stages} stages",
        f"however the layers are split, some stage holds {shown:,} or more",
        f"Give {shown:,} or more, or use more stages",
    )
