"""Compare all schedules for one model, one number of ranks and microbatches, and one memory limit.

Costs are those of one stage per rank, so that schedules with more stages compare: with v stages per rank,
each stage takes 1/v of the time and memory. The cost of an edge stays the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from math import ceil, floor, inf, log10
from typing import Any

from penstock.errors import ConfigError, InputError
from penstock.schedule.builders import BUILDERS, Builder
from penstock.schedule.ops import Op, Pair, Placement, Schedule, check_size, loop
from penstock.schedule.simulation.costs import Cost, Costs
from penstock.schedule.simulation.simulate import simulate
from penstock.schedule.simulation.timeline import Timeline

_DIVIDED = ("forward", "input_grad", "weight_grad", "activation", "held_for_weight", "held_in_forward",
            "held_in_backward", "recomputed", "exchange", "exchange_in_backward", "offloaded",
            "gather", "reduction")  # fmt: skip
_CROSSING = ("bytes", "buffer", "sent")
_STAGES_TRIED = (1, 2)
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Entry:
    """One schedule in the comparison.

    options: those that are not the builder's defaults
    schedule, timeline: None if the schedule does not exist for these numbers
    also: other names and options that make the same schedule
    fits: whether it exists and no rank holds more than the limit
    refusal: why it does not fit; advice: what to change to make it fit
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    schedule: Schedule | None = None
    timeline: Timeline | None = None
    also: tuple[str, ...] = ()
    fits: bool = True
    refusal: str = ""
    advice: str = ""

    @property
    def label(self) -> str:
        return " ".join([self.name, *(f"{name}={value}" for name, value in self.options.items())])

    @property
    def peak_memory(self) -> float:
        return max(self.timeline.peak_memory) if self.timeline else inf


def compare(
    *,
    ranks: int,
    microbatches: int,
    costs: Costs | None = None,
    memory_limit: float | None = None,
    builders: Mapping[str, Builder] = BUILDERS,
    extra: Iterable[tuple[str, Schedule]] = (),
) -> tuple[Entry, ...]:
    """Every training schedule of `builders`: first those that fit, by step time, then the others.

    costs: of one stage per rank: a number, or one for each rank
    memory_limit: the most that a rank may hold, in the unit of ``costs.activation``
    extra: names and schedules to compare with, such as the result of a search

    ``stages_per_rank`` is tried with 1 and 2, switches with both values. Equal schedules are one entry.
    Raises ConfigError for costs, a limit or numbers that no schedule can have.
    """
    costs = costs or Costs()
    _check(ranks, microbatches, costs, memory_limit)
    entries: list[Entry] = []
    for name, builder in builders.items():
        entries += _tried(name, builder, ranks, microbatches, costs)
    entries += [_simulated(Entry(name, schedule=schedule), costs) for name, schedule in extra]
    limited = [_limited(entry, memory_limit) for entry in _different(entries)]
    return tuple(sorted(limited, key=_order))


def share(costs: Costs, placement: Placement) -> Costs:
    """Divide `costs` of one stage per rank over the stages of `placement`.

    Raises ConfigError for a sequence that does not have one number per rank.
    """
    ranks, depth = placement.ranks, placement.depth

    def divided(name: str, factor: float) -> Cost | None:
        cost = getattr(costs, name)
        if cost is None:
            return None
        if isinstance(cost, int | float):
            return cost * factor
        if len(cost) != ranks:
            raise ConfigError(
                f"Costs({name}=...) with {len(cost)} numbers",
                f"for a comparison they are of a model in one stage a rank, and there are {ranks} ranks",
                f"Give one number for all ranks, or {ranks} of them",
            )
        slices = [cost[stage * ranks // depth] for stage in range(depth)]
        return [c * factor if isinstance(c, int | float) else [one * factor for one in c] for c in slices]

    changed: dict[str, Any] = {name: divided(name, ranks / depth) for name in _DIVIDED}
    changed |= {name: divided(name, 1.0) for name in _CROSSING}
    return replace(costs, **changed)


def _check(ranks: int, microbatches: int, costs: Costs, memory_limit: float | None) -> None:
    check_size(ranks, microbatches, max(_STAGES_TRIED))
    if memory_limit is not None and not memory_limit > 0:
        rule = "it is the most that a rank may hold, and each holds something"
        raise ConfigError(f"memory_limit={memory_limit!r}", rule, "Give more than 0, or leave it out")
    undivided = loop(ranks)
    for name in (*_DIVIDED, *_CROSSING):
        share(costs, undivided).rows(name, undivided, microbatches)
    if costs.overlaps:
        length = costs.side_by_side(undivided, microbatches)
        for stage, microbatch in product(range(ranks), range(microbatches)):
            # which refuses an exchange that is longer than its op
            length(Pair(Op(stage, "F", microbatch), Op(stage, "B", microbatch)))


def _tried(name: str, builder: Builder, ranks: int, microbatches: int, costs: Costs) -> list[Entry]:
    """An entry for each choice of options that the builder takes; if it takes none, only the first."""
    entries = [_built(name, builder, options, ranks, microbatches, costs) for options in _choices(builder)]
    return [entry for entry in entries if entry.schedule is not None] or entries[:1]


def _choices(builder: Builder) -> Iterator[dict[str, Any]]:
    """The options to try, the defaults first; without those that equal a default."""
    tried: dict[str, list[Any]] = {}
    for name, parameter in inspect.signature(builder).parameters.items():
        default = parameter.default
        if name == "stages_per_rank":
            tried[name] = [None, *(count for count in _STAGES_TRIED if count != default)]
            if default is inspect.Parameter.empty:
                tried[name].remove(None)
        elif isinstance(default, bool):
            tried[name] = [None, not default]
    for values in product(*tried.values()):
        yield {name: value for name, value in zip(tried, values, strict=True) if value is not None}


def _built(
    name: str, builder: Builder, options: dict[str, Any], ranks: int, microbatches: int, costs: Costs
) -> Entry:
    try:
        schedule = builder(ranks=ranks, microbatches=microbatches, **options)
        if costs != Costs() and "costs" in inspect.signature(builder).parameters:
            shared = share(costs, schedule.placement)
            schedule = builder(ranks=ranks, microbatches=microbatches, costs=shared, **options)
    except InputError as error:
        return Entry(name, options, fits=False, refusal=_in_short(error), advice=error.remedy)
    return _simulated(Entry(name, options, schedule), costs)


def _simulated(entry: Entry, costs: Costs) -> Entry:
    assert entry.schedule is not None
    if not entry.schedule.trains:
        return entry
    try:
        return replace(entry, timeline=simulate(entry.schedule, share(costs, entry.schedule.placement)))
    except InputError as error:
        return replace(entry, fits=False, refusal=_in_short(error))


def _different(entries: Iterable[Entry]) -> Iterator[Entry]:
    """Drop schedules for inference; merge equal ones under the shortest name."""
    equal: dict[object, list[Entry]] = {}
    for entry in entries:
        schedule = entry.schedule
        if schedule is None:
            yield entry
        elif schedule.trains:
            equal.setdefault((schedule.placement, schedule.programs, schedule.overlaps), []).append(entry)
    for same in equal.values():
        first, *others = sorted(same, key=lambda entry: len(entry.options))
        yield replace(first, also=tuple(entry.label for entry in others))


def _limited(entry: Entry, memory_limit: float | None) -> Entry:
    if memory_limit is None or entry.timeline is None or entry.peak_memory <= memory_limit * (1 + _ROUNDING):
        return entry
    needed = round_up(entry.peak_memory)
    refusal = f"a rank holds {needed} at its peak, and {memory_limit:g} is the limit"
    return replace(entry, fits=False, refusal=refusal, advice=f"Give a memory limit of {needed} or more")


def _order(entry: Entry) -> tuple[bool, float, float]:
    return not entry.fits, entry.timeline.makespan if entry.timeline else inf, entry.peak_memory


def _in_short(error: InputError) -> str:
    return f"{error.value}: {error.rule}".partition("\n")[0]


def round_up(value: float) -> str:
    """At most four digits, and never less than `value`."""
    if value <= 0 or float(value).is_integer():
        return f"{value:.0f}"
    digits = max(0, 3 - floor(log10(value)))
    return f"{ceil(value * 10**digits * (1 - _ROUNDING)) / 10**digits:.{digits}f}".rstrip("0").rstrip(".")
