"""The numbers of ranks and microbatches that a schedule may have."""

from __future__ import annotations

from penstock.errors import ConfigError
from penstock.schedule.ops import Schedule

_MOST_FORWARDS = 10_000_000  # some gigabytes; 64 ranks with 2 stages each and 1024 microbatches have 131,072


def check_size(ranks: int, microbatches: int, stages_per_rank: int = 1) -> None:
    """Raise ConfigError for numbers that no schedule can have, or one that would fill the memory."""
    for name, number in (("ranks", ranks), ("microbatches", microbatches)):
        if type(number) is not int or number < 1:
            raise no_count(name, number)
    if ranks * stages_per_rank * microbatches > _MOST_FORWARDS:
        raise ConfigError(
            f"{ranks} ranks with {stages_per_rank} stages each and {microbatches} microbatches",
            f"a schedule of more than {_MOST_FORWARDS:,} forwards would fill the memory",
            "Give smaller numbers",
        )


def no_count(name: str, number: object) -> ConfigError:
    rule = "a schedule has a whole number of them, and at least one"
    return ConfigError(f"{name}={number!r}", rule, "Give 1 or more")


def check_numbers(schedule: Schedule, ranks: int | None, microbatches: int | None) -> Schedule:
    """`schedule`, which brings numbers of its own. Raises ConfigError where others are given."""
    own_numbers = (
        ("ranks", ranks, schedule.ranks),
        ("microbatches", microbatches, schedule.microbatches),
    )
    for name, given, own in own_numbers:
        if given not in (None, own):
            raise ConfigError(
                f"{name}={given}", f"the schedule given has {own}", f"Leave it out, or give {name}={own}"
            )
    return schedule
