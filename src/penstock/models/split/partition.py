"""Which layers go to which stage: pure arithmetic, without a model.

A split is a list with one `range` of layers for each stage; stages may be empty. `partition` makes it from
one of several descriptions (penstock.options.SplitOptions):

    layout                  as penstock.schedule.layout reads it      "Ett|ttt|ttL"
    layers_per_stage        a number for each stage, or the maximum for all
    balance                 the cost of each layer: the slowest rank becomes as fast as possible
    first/last_stage_layers for these two stages; the others share the rest evenly
    evenly (default)        embedding and head count as layers        E t t | t t t | t t L

For names of modules in place of numbers of layers, see module_names.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from penstock.errors import ConfigError, PartitionError
from penstock.models.split.balanced_split import Holders, LayerCosts, as_layer_costs, balanced_split, ranges
from penstock.options import SplitOptions
from penstock.schedule.layout import Layout, read_layout


def partition(
    layers: int,
    stages: int,
    options: SplitOptions,
    *,
    balance: LayerCosts | Sequence[float] | None = None,
    holders: Holders | None = None,
    prediction_layers: int = 0,
) -> list[range]:
    """Split `layers` layers over `stages` stages by at most one description; evenly without any.

    A single number n for `layers_per_stage` makes ceil(layers / n) stages of even size, in which embedding
    and head do not count; `stages_of_size` gives their number per rank.

    Args:
        balance: cost of each layer
        holders: the ranks that have each stage, for `balance`
        prediction_layers: number of prediction layers (models/mtp.py) among the last layers: a layout has an
            `m` for each

    Raises:
        PartitionError: the description does not fit the model or the schedule.
        ConfigError: a number is out of range.
    """
    check_one_description(options, balance=balance)
    weights = options.embedding_weight, options.head_weight
    embedding, head = (1 if weight is None else weight for weight in weights)
    ends = options.first_stage_layers, options.last_stage_layers
    sizes = options.layers_per_stage
    if options.layout is not None:
        return _from_layout(options.layout, layers, stages, prediction_layers)
    if isinstance(sizes, int):
        return _from_size(sizes, layers, stages)
    if sizes is not None:
        remedies = (f"Give {_count(stages, 'number')}", f"Give numbers that add up to {layers}")
        return _checked(f"layers_per_stage={list(sizes)}", sizes, layers, stages, remedies)
    if balance is not None:
        return balanced_split(as_layer_costs(balance, layers), stages, holders=holders)
    if ends != (None, None):
        return _with_ends(layers, stages, ends, (embedding, head))
    return even_split(layers, stages, embedding, head)


def descriptions(options: SplitOptions, **others: object) -> list[str]:
    """The names of the options that are set, with those of `others`."""
    values = {option.name: getattr(options, option.name) for option in fields(SplitOptions)} | others
    return [name for name, value in values.items() if value is not None]


def check_one_description(options: SplitOptions, **others: object) -> None:
    """Raise PartitionError if more than one description is set, counting those of `others`.

    first_stage_layers and last_stage_layers together are one. embedding_weight and head_weight apply to an
    even division, which `balance` excludes.
    """
    names = descriptions(options, **others)
    if others.get("balance") is None:
        names = [name for name in names if name not in ("embedding_weight", "head_weight")]
    if len(names) > 1 and names != ["first_stage_layers", "last_stage_layers"]:
        raise PartitionError(" and ".join(names), "each of them assigns layers to stages", "Give one of them")


def even_split(layers: int, stages: int, embedding_weight: int = 1, head_weight: int = 1) -> list[range]:
    """Divide the layers evenly.

    The embedding counts as `embedding_weight` layers on the first stage and the head as `head_weight` on the
    last; the first stages take one more if the sum does not divide. A stage whose share would be only
    embedding or head takes one layer from the fullest stage.

    Raises PartitionError where there are more stages than layers.
    """
    for name, weight in (("embedding_weight", embedding_weight), ("head_weight", head_weight)):
        if weight < 0:
            raise ConfigError(f"{name}={weight}", "it counts layers", "Give 0 or more")
    check_enough(layers, stages)
    share, remainder = divmod(layers + embedding_weight + head_weight, stages)
    counts = [share + (stage < remainder) for stage in range(stages)]
    counts[0] -= embedding_weight
    counts[-1] -= head_weight
    while min(counts) < 1:
        counts[counts.index(max(counts))] -= 1
        counts[counts.index(min(counts))] += 1
    return ranges(counts)


def check_enough(layers: int, stages: int) -> None:
    """Raise PartitionError where there are more stages than layers."""
    if stages > layers:
        raise PartitionError(
            f"{stages} stages for {layers} layers",
            "only a layout can have a stage without layers",
            f"Use at most {layers} stages (ranks times stages per rank), a deeper model, or a layout",
        )


def to_layout(split: Sequence[range], prediction_layers: int = 0) -> str:
    """The split as a layout string, e.g. ``Ett|(t*3|)*4tL``. prediction_layers: how many layers are m"""
    return str(Layout.of([len(layers) for layers in split], prediction_layers))


def _from_layout(
    given: str | Sequence[Sequence[str]], layers: int, stages: int, prediction_layers: int
) -> list[range]:
    layout = read_layout(given)
    text = given if isinstance(given, str) else str(layout)
    value = f"layout {text if len(text) <= 60 else f'{text[:57]}...'!r}"
    if layout.prediction_layers != prediction_layers:
        layer_count = _count(layout.prediction_layers, "multi-token-prediction layer")
        built = f"the model is built with {prediction_layers or 'none'}"
        remedy = f"Write {prediction_layers} m behind the last t"
        without = "Set mtp_loss_scaling_factor to train the model's prediction layers, or remove m"
        raise PartitionError(
            value, f"it has {layer_count} (m), and {built}", remedy if prediction_layers else without
        )
    remedies = (f"Write {stages - 1} |", f"Write {layers - prediction_layers} t")
    return _checked(value, layout.counts, layers, stages, remedies, prediction_layers)


def _checked(
    value: str, counts: Sequence[int], layers: int, stages: int, remedies: tuple[str, str], predict: int = 0
) -> list[range]:
    """remedies: for another number of stages, and of layers; predict: number of layers that are m"""
    if any(count < 0 for count in counts):
        raise ConfigError(value, "a stage holds 0 layers or more", "Give 0 or more")
    if len(counts) != stages:
        rule = f"it has {_count(len(counts), 'stage')}, and the schedule has {stages}"
        raise PartitionError(value, rule, f"{remedies[0]}, or change ranks or stages per rank")
    if sum(counts) != layers:
        rule = f"it has {_count(sum(counts) - predict, 'layer')}, and the model has {layers - predict}"
        raise PartitionError(value, rule, remedies[1])
    return ranges(counts)


def _from_size(size: int, layers: int, stages: int) -> list[range]:
    """At most `size` layers a stage."""
    made = _stages_made(size, layers)
    if made != stages:
        fitting = [k for k in range(1, layers + 1) if -(-layers // k) == stages]
        remedy = f"Give {_some(fitting)}" if fitting else "Give a number for each stage"
        raise PartitionError(
            f"layers_per_stage={size}",
            f"{layers} layers make {_count(made, 'stage')} of it, and the schedule has {stages}",
            f"{remedy}, or change ranks or stages per rank",
        )
    return even_split(layers, stages, 0, 0)


def stages_of_size(size: int, layers: int, ranks: int, group: int = 1) -> int:
    """The number of stages of each of `ranks` ranks, if a stage has at most `size` of `layers` layers.

    group: a rank's number of stages is a multiple of it

    Raises PartitionError where no such number of stages divides by the ranks; it names the sizes that fit.
    """
    made, step = _stages_made(size, layers), ranks * group
    if made % step:
        counts = ((k, -(-layers // k)) for k in range(1, layers + 1))
        fitting = [f"{k} ({count} stages)" for k, count in counts if count % step == 0]
        otherwise = f"Use at most {layers} stages, or a number for each stage"
        raise PartitionError(
            f"layers_per_stage={size}",
            f"{layers} layers make {_count(made, 'stage')} of it, and the schedule takes multiples of {step}",
            f"Give {_some(fitting)}" if fitting else otherwise,
        )
    return made // ranks


def _stages_made(size: int, layers: int) -> int:
    if size < 1:
        rule = "a stage has at least one layer"
        raise ConfigError(f"layers_per_stage={size}", rule, "Give 1 or more")
    return -(-layers // size)


def _some(options: Sequence[object]) -> str:
    """5 or 6 or 7 or 8 or 9 ..."""
    return " or ".join(map(str, options[:5])) + (" ..." if len(options) > 5 else "")


def _with_ends(
    layers: int, stages: int, ends: tuple[int | None, int | None], weights: tuple[int, int]
) -> list[range]:
    """The given layers on first and last stage (None: like the others), the rest evenly on other stages."""
    fixed = [count for count in ends if count is not None]
    names = ("first_stage_layers", "last_stage_layers")
    shown = ", ".join(f"{n}={count}" for n, count in zip(names, ends, strict=True) if count is not None)
    if min(fixed) < 0:
        raise ConfigError(shown, "a stage holds 0 layers or more", "Give 0 or more")
    if stages < len(fixed):
        raise PartitionError(shown, "the first stage is the last one here", "Leave both out")
    between, left = stages - len(fixed), layers - sum(fixed)
    if left < between or (left and not between):
        room = layers - between
        raise PartitionError(
            shown,
            f"this leaves {left} of {layers} layers for {_count(between, 'other stage')}",
            f"Together they cannot be {'more' if between else 'other'} than {room} layers; a layout may "
            "leave stages empty",
        )
    first, last = ([] if count is None else [count] for count in ends)
    embedding, head = (weight if count is None else 0 for weight, count in zip(weights, ends, strict=True))
    middle = list(map(len, even_split(left, between, embedding, head))) if between else []
    return ranges([*first, *middle, *last])


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
