"""Which layers go to which stage: pure arithmetic.

`partition` is the one entry for the ways to say it: evenly (the default), a layout string, layers per stage,
first and last stage, or a cost for each layer. Names of modules are in `named_modules`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise

from penstock.errors import ConfigError, PartitionError
from penstock.schedule.layout import Layout, parse_layout

# ---- The balanced split: contiguous layers for each stage, so that the slowest stage is as fast as can be.


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


__all__ = [
    "LayerCosts", "Memory", "balanced_split", "check_ways", "even_split", "partition", "stages_of_size",
    "to_layout",
]  # fmt: skip


def partition(
    layers: int,
    stages: int,
    *,
    layout: str | None = None,
    layers_per_stage: int | Sequence[int] | None = None,
    first_stage_layers: int | None = None,
    last_stage_layers: int | None = None,
    balance: LayerCosts | Sequence[float] | None = None,
    embedding_weight: int = 1,
    head_weight: int = 1,
) -> list[range]:
    """The layers of each stage, said in one way at most; evenly where it is said in none.

    layout: a layout string, see penstock.schedule.layout
    layers_per_stage: for every stage its own number, or one number that is the most for each: then the
        layers make up ceil(layers / number) stages and are dealt out evenly, embedding and head not counted
    first_stage_layers, last_stage_layers: of these stages; the rest is dealt out evenly to the others.
        0 leaves the stage the embedding or the head alone
    balance: what each layer costs, as measured or counted in any one unit, or a LayerCosts, where embedding
        and head cost something too; the split is the balanced one
    embedding_weight, head_weight: how many layers these count for, where it is not said how many layers
        stand beside them

    Raises PartitionError where this does not fit the model and the schedule, ConfigError for a number out of
    range.
    """
    check_ways(
        layout=layout, layers_per_stage=layers_per_stage, first_stage_layers=first_stage_layers,
        last_stage_layers=last_stage_layers, balance=balance,
    )  # fmt: skip
    if layout is not None:
        return _from_layout(layout, layers, stages)
    if layers_per_stage is not None and not isinstance(layers_per_stage, int):
        return _from_counts(layers_per_stage, layers, stages)
    if layers_per_stage is not None:
        return _from_size(layers_per_stage, layers, stages)
    if balance is not None:
        costs = as_layer_costs(balance, layers)
        return balanced_split(costs.layers, stages, embedding_cost=costs.embedding, head_cost=costs.head)
    if first_stage_layers is None and last_stage_layers is None:
        return even_split(layers, stages, embedding_weight, head_weight)
    ends = (first_stage_layers, last_stage_layers)
    return _with_ends(layers, stages, ends, (embedding_weight, head_weight))


def check_ways(**ways: object) -> None:
    """Raises PartitionError where more than one way (a keyword that is not None) is given.

    first_stage_layers and last_stage_layers are one way together.
    """
    given = [name for name, value in ways.items() if value is not None]
    ends = [name for name in given if name in ("first_stage_layers", "last_stage_layers")]
    if len(given) > 1 and given != ends:
        raise PartitionError(
            " and ".join(given), "each says by itself which layers go to which stage", "Give one of them"
        )


def even_split(layers: int, stages: int, embedding_weight: int = 1, head_weight: int = 1) -> list[range]:
    """The layers of each stage, dealt out evenly in units.

    The embedding counts as `embedding_weight` layers on the first stage and the head as `head_weight` on
    the last. The units are divided by the stages; the first stages take one of the remainder each. A stage
    whose share would be all embedding or head still gets one layer, from the fullest of the others.

    Raises PartitionError where there are more stages than layers.
    """
    for name, weight in (("embedding_weight", embedding_weight), ("head_weight", head_weight)):
        if weight < 0:
            raise ConfigError(f"{name}={weight}", "it counts layers", "Give 0 or more")
    if stages > layers:
        raise PartitionError(
            f"{stages} stages for {layers} layers",
            "every stage holds at least one layer",
            f"Use at most {layers} stages (ranks times stages per rank), or a deeper model; stages without "
            "layers need a layout",
        )
    share, remainder = divmod(layers + embedding_weight + head_weight, stages)
    counts = [share + (stage < remainder) for stage in range(stages)]
    counts[0] -= embedding_weight
    counts[-1] -= head_weight
    while min(counts) < 1:
        counts[counts.index(max(counts))] -= 1
        counts[counts.index(min(counts))] += 1
    return _ranges(counts)


def stages_of_size(layers: int, layers_per_stage: int, ranks: int) -> int:
    """How many stages `layers_per_stage` layers, or fewer, in each make; every rank hosts as many of them.

    Raises PartitionError where they cannot be shared out equally, with the numbers that can.
    """
    _check_size(layers_per_stage)
    stages = -(-layers // layers_per_stage)
    if stages % ranks:
        fitting = [k for k in range(1, layers + 1) if -(-layers // k) % ranks == 0]
        options = f"Give {_options(fitting)}" if fitting else f"Use {layers} ranks or fewer"
        raise PartitionError(
            f"layers_per_stage={layers_per_stage}",
            f"{layers} layers make {stages} stages of it, and {ranks} ranks cannot host equally many",
            options,
        )
    return stages


def to_layout(ranges: Sequence[range]) -> str:
    """The split as a layout string, e.g. ``Ett|(t*3|)*4tL``."""
    return str(Layout.of([len(part) for part in ranges]))


def _from_layout(text: str, layers: int, stages: int) -> list[range]:
    layout = parse_layout(text)
    if layout.prediction_layers:
        raise PartitionError(
            f"layout {_short(text)}",
            "it places multi-token-prediction layers (m), and models of transformers come without any",
            "Take m away",
        )
    parts = list(layout.layers)
    if len(parts) != stages:
        raise PartitionError(
            f"layout {_short(text)}",
            f"it has {_count(len(parts), 'stage')}, and the schedule has {stages}",
            f"Write {stages - 1} |, or change ranks or stages per rank",
        )
    if parts[-1].stop != layers:
        raise PartitionError(
            f"layout {_short(text)}",
            f"it has {_count(parts[-1].stop, 'layer')} (t), and the model has {layers}",
            f"Write {layers} of them",
        )
    return parts


def _from_counts(counts: Sequence[int], layers: int, stages: int) -> list[range]:
    name = f"layers_per_stage={list(counts)}"
    if any(count < 0 for count in counts):
        raise ConfigError(name, "a stage holds 0 layers or more", "Give 0 or more")
    if len(counts) != stages:
        rule = f"it has {_count(len(counts), 'stage')}, and the schedule has {stages}"
        raise PartitionError(name, rule, f"Give {_count(stages, 'number')}")
    if sum(counts) != layers:
        rule = f"they add up to {sum(counts)}, and the model has {_count(layers, 'layer')}"
        raise PartitionError(name, rule, f"Give numbers that add up to {layers}")
    return _ranges(counts)


def _from_size(size: int, layers: int, stages: int) -> list[range]:
    """At most `size` layers a stage."""
    _check_size(size)
    made = -(-layers // size)
    if made != stages:
        fitting = [k for k in range(1, layers + 1) if -(-layers // k) == stages]
        remedy = f"Give {_options(fitting)}" if fitting else "Give a number for each stage"
        raise PartitionError(
            f"layers_per_stage={size}",
            f"{layers} layers make {_count(made, 'stage')} of it, and the schedule has {stages}",
            f"{remedy}, or change ranks or stages per rank",
        )
    return even_split(layers, stages, 0, 0)


def _with_ends(
    layers: int, stages: int, ends: tuple[int | None, int | None], weights: tuple[int, int]
) -> list[range]:
    """First, last or both as said, and what is left evenly on the other stages."""
    names = ("first_stage_layers", "last_stage_layers")
    given = [(name, count) for name, count in zip(names, ends, strict=True) if count is not None]
    shown = ", ".join(f"{name}={count}" for name, count in given)
    if any(count < 0 for _, count in given):
        raise ConfigError(shown, "a stage holds 0 layers or more", "Give 0 or more")
    if stages < len(given):
        raise PartitionError(shown, "the first stage is the last one here", "Leave both out")
    between, left = stages - len(given), layers - sum(count for _, count in given)
    if left < between or (left and not between):
        rule = f"this leaves {left} of {layers} layers for {_count(between, 'other stage')}"
        room = layers - between
        need = f"more than {room}" if between else f"other than {room}"
        raise PartitionError(
            shown, rule, f"Together they cannot be {need} layers; a layout may leave stages empty"
        )
    first, last = ends
    middle = []
    if between:
        beside = (weights[0] if first is None else 0, weights[1] if last is None else 0)
        middle = [len(part) for part in even_split(left, between, *beside)]
    return _ranges([*([] if first is None else [first]), *middle, *([] if last is None else [last])])


def _check_size(size: int) -> None:
    if size < 1:
        raise ConfigError(
            f"layers_per_stage={size}", "a stage of that many layers never ends", "Give 1 or more"
        )


def _ranges(counts: Sequence[int]) -> list[range]:
    return [range(start, end) for start, end in pairwise(accumulate(counts, initial=0))]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _options(numbers: Sequence[int]) -> str:
    shown = [str(number) for number in numbers[:5]]
    more = " ..." if len(numbers) > 5 else ""
    return " or ".join(shown) + more


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")
