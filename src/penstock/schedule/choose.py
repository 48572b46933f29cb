"""Choose a schedule by its name and options, from Python or from a config file.

    build("1f1b", ranks=4, microbatches=8, stages_per_rank=2, zero_bubble=True)
    {"schedule": "1f1b", "stages_per_rank": 2, "zero_bubble": true}

The options of a schedule are the parameters of the function that makes it.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from functools import wraps
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.schedule.builders import BUILDERS
from penstock.schedule.collector import collector_paused
from penstock.schedule.files import load
from penstock.schedule.ops import Schedule, check_numbers, check_size, not_a_count
from penstock.schedule.search import search
from penstock.schedule.simulation.costs import Costs

_SIZES = ("ranks", "microbatches")
NEEDED = inspect.Parameter.empty  # the default of an option that has none

# ---- What makes a schedule


def _any_1f1b(
    ranks: int,
    microbatches: int,
    stages_per_rank: int = 1,
    zero_bubble: bool = False,
    paired: bool = False,
    microbatch_group_size: int | None = None,
) -> Schedule:
    """1F1B in all its forms: plain or paired with one stage per rank, interleaved with several."""
    if stages_per_rank == 1:
        options: dict[str, Any] = {"zero_bubble": zero_bubble, "paired": paired}
        return BUILDERS["1f1b"](ranks=ranks, microbatches=microbatches, **options)
    name = "interleaved_zero_bubble" if zero_bubble else "interleaved_1f1b"
    options = {"stages_per_rank": stages_per_rank, "microbatch_group_size": microbatch_group_size}
    return BUILDERS[name](ranks=ranks, microbatches=microbatches, **options)


@wraps(search)  # for its options
def _searched(**options: Any) -> Schedule:
    return search(**options).schedule


def _from_file(ranks: int, microbatches: int, path: str) -> Schedule:
    """A file that `penstock.schedule.dump` or PyTorch wrote."""
    return check_numbers(load(Path(path)), ranks, microbatches)


MAKERS: dict[str, Callable[..., Schedule]] = {
    **BUILDERS, "1f1b": _any_1f1b, "searched": _searched, "file": _from_file,
}  # fmt: skip
_V_SHAPED = ("zb_v", "v_half", "v_min", "dualpipe_v")


def options_of(name: str) -> dict[str, Any]:
    """The options of the schedule called `name`, with their defaults; NEEDED where there is none."""
    parameters = inspect.signature(MAKERS[name]).parameters
    options = {option: parameter.default for option, parameter in parameters.items() if option not in _SIZES}
    # a V has two stages per rank; a config may say so
    return {"stages_per_rank": 2, **options} if name in _V_SHAPED else options


# ---- What schedules are called: their names here, and the spellings of other libraries and the papers


_ALIASES = {
    "afab": "gpipe",
    "allforwardallbackward": "gpipe",
    "pipedreamflush": "1f1b",
    "interleaved": "interleaved_1f1b",
    "zb1p": "zb_h1",
    "zbvzerobubble": "zb_v",
    "zerobubblev": "zb_v",
}
_SPELT = {re.sub(r"[^a-z0-9]", "", name): name for name in MAKERS} | _ALIASES
# options that set the number of stages a rank has, and how many stages one unit of each adds
_STAGES = {"stages_per_rank": 1, "waves": 2}
_OPTION_ALIASES = {
    "num_stages_per_rank": "stages_per_rank",
    "microbatch_group_size_per_vp_stage": "microbatch_group_size",
    "num_waves": "waves",
}


def canonical(name: str) -> str:
    """The name of a schedule from any of its spellings: 1F1B, afab, zero_bubble_v. Raises ConfigError."""
    key = re.sub(r"[^a-z0-9]", "", name.lower()).removeprefix("schedule")
    if key in _SPELT:
        return _SPELT[key]
    near = difflib.get_close_matches(key, _SPELT, n=1)
    remedy = f"Did you mean {_SPELT[near[0]]!r}?" if near else "Take one of these"
    raise ConfigError(f"schedule {name!r}", f"the known schedules are {', '.join(MAKERS)}", remedy)


# ---- Configs


@dataclass(frozen=True)
class ScheduleConfig:
    """A schedule's name and all of its options. Made by `schedule_config`, which checks them.

    It can be the type of a field of a pydantic model, which then takes a name or a mapping.
    """

    schedule: str
    options: Mapping[str, Any] = field(hash=False)

    def build(self, ranks: int, microbatches: int) -> Schedule:
        """Make the schedule. Raises ConfigError for sizes that it does not take."""
        stages = max(count * (self.options.get(option) or 0) for option, count in _STAGES.items())
        check_size(ranks, microbatches, stages or 1)
        parameters = inspect.signature(MAKERS[self.schedule]).parameters
        options = {name: value for name, value in self.options.items() if name in parameters}
        with collector_paused(all_stay=True) if self.schedule in BUILDERS else nullcontext():
            return MAKERS[self.schedule](ranks=ranks, microbatches=microbatches, **options)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: object) -> Any:
        from pydantic_core import core_schema

        def read(value: Any) -> ScheduleConfig:
            try:
                return schedule_config(value)
            except ConfigError as error:
                raise ValueError(str(error)) from error

        def write(config: ScheduleConfig) -> dict[str, Any]:
            return {"schedule": config.schedule, **config.options}

        return core_schema.no_info_plain_validator_function(
            read, serialization=core_schema.plain_serializer_function_ser_schema(write)
        )


def schedule_config(choice: object) -> ScheduleConfig:
    """Read a name, or a mapping with the name under `schedule` and options; a config stays as it is.

    Raises ConfigError.
    """
    if isinstance(choice, ScheduleConfig):
        return choice
    remedy = f"Take one of {', '.join(MAKERS)}"
    if not isinstance(choice, str | Mapping):
        rule = "a schedule is a name, or a mapping with its name under `schedule` and its options"
        raise ConfigError(f"schedule {choice!r}", rule, remedy)
    options: dict[str, Any] = {"schedule": choice} if isinstance(choice, str) else dict(choice)
    name = options.get("schedule")
    if not isinstance(name, str):
        keys = ", ".join(map(str, options)) or "none"
        raise ConfigError(f"a schedule of the keys {keys}", "its name stands under `schedule`", remedy)
    name = canonical(name)
    known, checked = options_of(name), {}
    for written, value in options.items():
        if written == "schedule":
            continue
        option = _OPTION_ALIASES.get(written, written)
        if option not in known:
            near = difflib.get_close_matches(str(written), known, n=1)
            raise ConfigError(
                f"schedule option {written}={value!r}",
                f"schedule {name!r} takes {', '.join(['ranks', 'microbatches', *known])}",
                f"Did you mean {near[0]}?" if near else "Leave it out, or take a schedule that has it",
            )
        if option in checked:
            again = f"schedule option {written}={value!r}"
            raise ConfigError(again, f"{option} is given under its other name, too", "Give it once")
        checked[option] = _checked(name, option, value, known, written)
    for option, default in known.items():
        if checked.setdefault(option, default) is NEEDED:
            raise ConfigError(f"schedule {name!r} without {option}", "it has no default", f"Give {option}")
    _check_together(name, checked)
    return ScheduleConfig(name, {option: checked[option] for option in known})


def _is_positive(value: object) -> bool:
    return type(value) in (int, float) and 0 < value < float("inf")  # type: ignore[operator]


# what the values of an option are, and how an error says it; all other options are counts
_VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "zero_bubble": (lambda value: isinstance(value, bool), "true or false"),
    "paired": (lambda value: isinstance(value, bool), "true or false"),
    "placement": (lambda value: value in ("loop", "v"), "'loop' or 'v'"),
    "objective": (lambda value: value in ("makespan", "extent"), "'makespan' or 'extent'"),
    "memory_limit": (_is_positive, "a number above 0"),
    "seconds": (_is_positive, "a number above 0"),
    "seed": (lambda value: type(value) is int and value >= 0, "a whole number from 0 on"),
    "path": (lambda value: isinstance(value, str), "the path of a file"),
    "costs": (lambda value: isinstance(value, Costs), "Costs, or a mapping of them"),
}


def _checked(name: str, option: str, value: Any, known: Mapping[str, Any], written: str) -> Any:
    """The value of an option, if it is of the right kind. written: as the caller spells the option"""
    if value is None and known[option] is None:
        return None
    if option not in _VALUES:
        if type(value) is not int or value < 1:
            raise not_a_count(written, value)
        return value
    if option == "costs" and isinstance(value, Mapping):
        value = _read_costs(value)
    is_right, values = _VALUES[option]
    if not is_right(value):
        remedy = f"Schedule {name!r} takes {', '.join(known)}"
        raise ConfigError(f"{option}={value!r}", f"it should be {values}", remedy)
    return value


def _read_costs(mapping: Mapping[Any, Any]) -> Costs:
    known = [cost.name for cost in fields(Costs)]
    for name in mapping:
        if name not in known:
            raise ConfigError(f"costs with {name!r}", f"costs are {', '.join(known)}", "Leave it out")
    return Costs(**mapping)


def _check_together(name: str, options: Mapping[str, Any]) -> None:
    """Raise ConfigError for options that exclude each other."""
    stages = options.get("stages_per_rank")
    if name in _V_SHAPED and stages != 2:
        rule = f"{name} has two stages a rank"
        raise ConfigError(f"stages_per_rank={stages}", rule, "Give 2, or leave it out")
    if name in _V_SHAPED and options.get("objective") == "extent" and options["costs"] is None:
        rule = f"{name} is formed for an objective at given costs"
        raise ConfigError("objective='extent' without costs", rule, "Give costs, or leave it out")
    if name != "1f1b":
        return
    size = options["microbatch_group_size"]
    if size is not None and stages == 1:
        rule = "with stages_per_rank=1 there are no groups"
        remedy = "Give stages_per_rank=2 or more, or leave it out"
        raise ConfigError(f"microbatch_group_size={size}", rule, remedy)
    if options["paired"] and stages != 1:
        raise ConfigError(
            f"paired=True with stages_per_rank={stages}",
            "pairs are of 1f1b with one stage a rank",
            "Take dualpipe_v, which pairs with two, or leave it out",
        )


# ---- The schedule


ScheduleLike = str | Mapping[str, Any] | ScheduleConfig | Schedule


def build(name: str, *, ranks: int, microbatches: int, **options: Any) -> Schedule:
    """The schedule called `name`, in any of its spellings.

    ranks, microbatches: whole numbers of at least 1
    options: those of the schedule, such as ``stages_per_rank`` and ``zero_bubble`` for ``1f1b``

    Raises ConfigError for an unknown name or option, and for sizes that the schedule does not take.
    """
    if "schedule" in options:
        raise named_twice(name, options["schedule"])
    return chosen_schedule({"schedule": name, **options}, ranks, microbatches)


def named_twice(name: str, option: object) -> ConfigError:
    """The error for an option called `schedule` next to the schedule's name."""
    return ConfigError(
        f"schedule option schedule={option!r}", f"the name is {name!r} already", "Leave it out"
    )


def chosen_schedule(choice: ScheduleLike, ranks: int | None, microbatches: int | None) -> Schedule:
    """A schedule as it is, or built from a name or config. Raises ConfigError.

    ranks, microbatches: needed for a name or config; those of a schedule, or None, otherwise
    """
    if isinstance(choice, Schedule):
        return check_numbers(choice, ranks, microbatches)
    config = schedule_config(choice)
    if ranks is None or microbatches is None:
        missing = "ranks" if ranks is None else "microbatches"
        value = f"schedule={config.schedule!r} without {missing}"
        raise ConfigError(value, "a named schedule needs it", f"Give {missing}")
    return config.build(ranks, microbatches)


def open_stages(choice: ScheduleLike) -> tuple[str, int] | None:
    """The option of `choice` that says how many stages a rank has, where `choice` leaves it out.

    Returns its name and how many stages it counts; None where it is given or fixed. Raises ConfigError.
    """
    if isinstance(choice, Schedule | ScheduleConfig):
        return None
    name = schedule_config(choice).schedule
    given = {} if isinstance(choice, str) else choice
    named = {_OPTION_ALIASES.get(option, option) for option in given}
    known = inspect.signature(MAKERS[name]).parameters
    return next(((o, count) for o, count in _STAGES.items() if o in known and o not in named), None)


def with_option(choice: ScheduleLike, option: str, value: int) -> dict[str, Any]:
    """`choice`, a name or a mapping, with one option more."""
    assert isinstance(choice, str | Mapping)
    return {**({"schedule": choice} if isinstance(choice, str) else choice), option: value}


def with_microbatches(choice: ScheduleLike, chosen: Schedule, microbatches: int) -> Schedule:
    """Build `choice` for another number of microbatches than `chosen` has. Raises ConfigError.

    The result has the stages of `chosen`, also where `choice` leaves their number open.
    """
    config = None if isinstance(choice, Schedule) else schedule_config(choice)
    if config is None or config.schedule == "file":
        raise ConfigError(
            f"a step of {microbatches} microbatches",
            f"schedule {chosen.name!r} was given as it is, for {chosen.microbatches}",
            f"Give {chosen.microbatches}, or take a schedule by its name, which is made for any number",
        )
    if (option := open_stages(choice)) is not None:
        name, count = option
        config = schedule_config(with_option(choice, name, chosen.stages // chosen.ranks // count))
    return config.build(chosen.ranks, microbatches)
