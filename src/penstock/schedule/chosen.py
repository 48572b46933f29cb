"""The schedule that is chosen: by a name and options, by a config or its mapping, or given as it is."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, TypeAdapter, ValidationError

from penstock.errors import ConfigError
from penstock.schedule.config import CONFIGS, KnownConfig, ScheduleConfig
from penstock.schedule.names import canonical
from penstock.schedule.ops import Schedule
from penstock.schedule.sizes import check_numbers, check_size, no_count

ScheduleLike = str | Mapping[str, Any] | ScheduleConfig | Schedule


def build(name: str, *, ranks: int, microbatches: int, **options: Any) -> Schedule:
    """The schedule called `name`, in any of its spellings, for `ranks` ranks and `microbatches` microbatches.

    Further keywords are its own options, e.g. ``stages_per_rank`` and ``zero_bubble`` for ``1f1b``. Raises
    ConfigError for an unknown name, an unknown option, or numbers that do not fit.
    """
    if "schedule" in options:
        raise named_twice(name, options["schedule"])
    return chosen_schedule({"schedule": name, **options}, ranks, microbatches)


def named_twice(name: str, option: object) -> ConfigError:
    """What is wrong with an option called `schedule` beside the schedule's name."""
    rule = f"the name is {name!r} already"
    return ConfigError(f"schedule option schedule={option!r}", rule, "Leave it out")


def chosen_schedule(given: ScheduleLike, ranks: int | None, microbatches: int | None) -> Schedule:
    """The schedule itself, or the one that the name or config stands for. Raises ConfigError."""
    if isinstance(given, Schedule):
        return check_numbers(given, ranks, microbatches)
    config = schedule_config(given)
    for name, number in (("ranks", ranks), ("microbatches", microbatches)):
        if number is None:
            value = f"schedule={config.schedule!r} without {name}"
            raise ConfigError(value, "a named schedule needs it", f"Give {name}")
    assert ranks is not None
    assert microbatches is not None
    stages = getattr(config, "stages_per_rank", None) or 2 * getattr(config, "waves", 0) or 1
    check_size(ranks, microbatches, stages)
    return config.build(ranks, microbatches)


def _spell(given: object) -> object:
    """A name alone, or in any spelling, as the mapping that the models read."""
    if isinstance(given, str):
        given = {"schedule": given}
    if isinstance(given, Mapping) and isinstance(given.get("schedule"), str):
        try:
            return {**given, "schedule": canonical(given["schedule"])}
        except ConfigError as error:
            raise ValueError(str(error)) from error
    return given


AnySchedule = Annotated[KnownConfig, BeforeValidator(_spell)]
_ADAPTER: TypeAdapter[ScheduleConfig] = TypeAdapter(AnySchedule)


def schedule_config(given: str | Mapping[str, Any] | ScheduleConfig) -> ScheduleConfig:
    """The config that a name or a mapping stands for. Raises ConfigError."""
    if isinstance(given, ScheduleConfig):
        return given
    if not isinstance(given, str | Mapping):
        raise ConfigError(
            f"schedule {given!r}",
            "a schedule is a name, or a mapping with its name under `schedule` and its options",
            f"Take one of {', '.join(CONFIGS)}",
        )
    mapping = {"schedule": given} if isinstance(given, str) else dict(given)
    if not isinstance(mapping.get("schedule"), str):
        raise ConfigError(
            f"a schedule of the keys {', '.join(map(str, mapping)) or 'none'}",
            "its name stands under `schedule`",
            f"Take one of {', '.join(CONFIGS)}",
        )
    mapping["schedule"] = name = canonical(mapping["schedule"])
    try:
        return _ADAPTER.validate_python(mapping)
    except ValidationError as error:
        raise _complain(name, error) from error


def _complain(name: str, error: ValidationError) -> ConfigError:
    """The first of pydantic's findings in the user's words."""
    entry: Any = error.errors(include_url=False)[0]
    option = str(entry["loc"][-1]) if entry["loc"] else "schedule"
    takes = [field for field in CONFIGS[name].model_fields if field != "schedule"]
    if entry["type"] == "missing":
        return ConfigError(f"schedule {name!r} without {option}", "it needs that", f"Give {option}")
    if entry["type"] == "extra_forbidden":
        near = difflib.get_close_matches(option, takes, n=1)
        return ConfigError(
            f"schedule option {option}={entry['input']!r}",
            f"schedule {name!r} takes {', '.join(['ranks', 'microbatches', *takes])}",
            f"Did you mean {near[0]}?" if near else "Leave it out, or take a schedule that has it",
        )
    if entry["type"] == "value_error":  # our own: "value: rule; remedy"
        value, _, rest = str(entry["ctx"]["error"]).partition(": ")
        rule, _, remedy = rest.partition("; ")
        return ConfigError(value, rule, remedy.capitalize())
    counts = entry.get("ctx", {}).get("ge", 1) > 0  # a seed may be 0
    if counts and entry["type"] in ("int_type", "int_from_float", "greater_than_equal"):
        return no_count(option, entry["input"])
    rule = entry["msg"].replace("Input should", "it should")
    return ConfigError(f"{option}={entry['input']!r}", rule, f"Schedule {name!r} takes {', '.join(takes)}")
