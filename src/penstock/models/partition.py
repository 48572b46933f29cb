"""Which layers go to which stage: pure arithmetic.

`partition` is the one entry for the ways to say it: evenly (the default), a layout string, layers per stage,
first and last stage, or a cost for each layer. Names of modules are in `named_modules`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from penstock.errors import ConfigError, PartitionError
from penstock.models.balance import LayerCosts, Memory, as_layer_costs, balanced_split
from penstock.schedule.layout import Layout, parse_layout

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
