"""What the builders have to offer: what a search has to beat, and where it starts from."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

from penstock.errors import ConfigError
from penstock.schedule.builders import BUILDERS
from penstock.schedule.costs import Costs
from penstock.schedule.ops import Schedule
from penstock.schedule.placement import Placement


def candidates(placement: Placement, microbatches: int, costs: Costs) -> Iterator[tuple[str, Schedule]]:
    """Every builder's schedules on this placement, each with the builder's name; "paired" behind it where it
    is an option that was taken. Each one trains.
    """
    for name, builder in BUILDERS.items():
        for options in _options(builder, placement, costs):
            try:
                found = builder(ranks=placement.ranks, microbatches=microbatches, **options)
            except ConfigError:  # it has rules about the sizes
                continue
            if found.placement == placement and found.trains:
                yield f"{name} paired" if options.get("paired") else name, found


def _options(
    builder: Callable[..., Schedule], placement: Placement, costs: Costs
) -> Iterator[dict[str, Any]]:
    """What to call a builder with, for what it knows of these: a placement's laps, costs, split backwards."""
    known = inspect.signature(builder).parameters
    laps = placement.stages // placement.ranks
    choices: dict[str, tuple[Any, ...]] = {
        "stages_per_rank": (laps,),
        "waves": (laps // 2,) if laps > 1 else (),
        "zero_bubble": (False, True),
        "paired": (False, True) if costs.overlaps else (False,),
        "costs": (costs,),
    }
    given = [[(option, value) for value in values] for option, values in choices.items() if option in known]
    return (dict(picked) for picked in product(*given))
