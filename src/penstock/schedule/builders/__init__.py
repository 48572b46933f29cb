"""The schedules known by name, one file per family."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable

from penstock.errors import ConfigError
from penstock.schedule.builders.gpipe import gpipe
from penstock.schedule.builders.inference import inference
from penstock.schedule.builders.one_f_one_b import one_f_one_b
from penstock.schedule.ops import Schedule

BUILDERS: dict[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "inference": inference,
}


def build(name: str, *, ranks: int, microbatches: int, **options: int) -> Schedule:
    """The schedule called `name` for `ranks` ranks and `microbatches` microbatches.

    Further keywords are the builder's own, e.g. ``stages_per_rank`` for ``inference``. Raises ConfigError
    for an unknown name, an unknown option, or a number below 1.
    """
    builder = BUILDERS.get(name)
    if builder is None:
        near = difflib.get_close_matches(name.lower(), BUILDERS, n=1)
        remedy = f"Did you mean {near[0]!r}?" if near else f"Take one of {', '.join(BUILDERS)}"
        raise ConfigError(f"schedule {name!r}", f"the known schedules are {', '.join(BUILDERS)}", remedy)
    accepted = list(inspect.signature(builder).parameters)
    for option, value in {"ranks": ranks, "microbatches": microbatches, **options}.items():
        if option not in accepted:
            raise ConfigError(
                f"schedule option {option}={value}",
                f"schedule {name!r} takes {', '.join(accepted)}",
                "Leave it out, or take a schedule that has it",
            )
        if not isinstance(value, int) or value < 1:
            rule = "a schedule has a whole number of them, and at least one"
            raise ConfigError(f"{option}={value!r}", rule, "Give 1 or more")
    return builder(ranks=ranks, microbatches=microbatches, **options)


def named_schedule(schedule: str | Schedule, ranks: int | None, microbatches: int | None) -> Schedule:
    """The schedule itself, or the one of that name. Raises ConfigError."""
    if isinstance(schedule, Schedule):
        own_numbers = (
            ("ranks", ranks, schedule.ranks),
            ("microbatches", microbatches, schedule.microbatches),
        )
        for name, given, own in own_numbers:
            if given not in (None, own):
                raise ConfigError(f"{name}={given}", f"the schedule given has {own}", "Leave it out")
        return schedule
    for name, given in (("ranks", ranks), ("microbatches", microbatches)):
        if given is None:
            raise ConfigError(
                f"schedule={schedule!r} without {name}", "a named schedule needs it", f"Give {name}"
            )
    assert ranks is not None
    assert microbatches is not None
    return build(schedule, ranks=ranks, microbatches=microbatches)


__all__ = ["BUILDERS", "build", "named_schedule"]
