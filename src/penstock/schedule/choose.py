"""A schedule as a config says it: its name under `schedule`, and the options that this one takes.

{"schedule": "1f1b", "stages_per_rank": 2, "zero_bubble": true}
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from penstock.errors import ConfigError
from penstock.schedule.builders import BUILDERS
from penstock.schedule.costs import Costs
from penstock.schedule.ops import Schedule, check_numbers, check_size, no_count

_Count = Annotated[int, Field(ge=1)]
_STAGES_PER_RANK = AliasChoices("stages_per_rank", "num_stages_per_rank")
_StagesPerRank = Annotated[_Count, Field(validation_alias=_STAGES_PER_RANK)]
_GROUP_SIZE = AliasChoices("microbatch_group_size", "microbatch_group_size_per_vp_stage")
_GroupSize = Annotated[_Count | None, Field(validation_alias=_GROUP_SIZE)]


def _read_costs(given: object) -> object:
    """Also from a mapping, as a config file has it."""
    if not isinstance(given, Mapping):
        return given
    known = [field.name for field in fields(Costs)]
    for name in given:
        if name not in known:
            raise ValueError(f"costs with {name!r}: costs are {', '.join(known)}; leave it out")
    return Costs(**given)


_Costs = Annotated[Costs | None, BeforeValidator(_read_costs)]


class ScheduleConfig(BaseModel):
    """One schedule and its options; `build` makes it for a number of ranks and microbatches."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    schedule: str

    def build(self, ranks: int, microbatches: int) -> Schedule:
        """Raises ConfigError where these numbers do not fit the schedule."""
        return BUILDERS[self.schedule](ranks=ranks, microbatches=microbatches, **self.options)

    @property
    def options(self) -> dict[str, Any]:
        """What the builder takes besides ranks and microbatches."""
        return {name: getattr(self, name) for name in type(self).model_fields if name != "schedule"}


class Inference(ScheduleConfig):
    schedule: Literal["inference"]
    stages_per_rank: _StagesPerRank = 1


class GPipe(ScheduleConfig):
    schedule: Literal["gpipe"]


class LoopedBFS(ScheduleConfig):
    schedule: Literal["looped_bfs"]
    stages_per_rank: _StagesPerRank = 2


class OneFOneB(ScheduleConfig):
    """1F1B in all its forms: interleaved from two stages a rank on, backwards split with `zero_bubble`, each
    forward beside a backward with `paired`.
    """

    schedule: Literal["1f1b"]
    stages_per_rank: _StagesPerRank = 1
    zero_bubble: bool = False
    paired: bool = False
    microbatch_group_size: _GroupSize = None

    @model_validator(mode="after")
    def fits(self) -> Self:
        if self.microbatch_group_size is not None and self.stages_per_rank == 1:
            raise ValueError(
                f"microbatch_group_size={self.microbatch_group_size}: with stages_per_rank=1 there are "
                "no groups; give stages_per_rank=2 or more, or leave it out"
            )
        if self.paired and self.stages_per_rank > 1:
            raise ValueError(
                f"paired=True with stages_per_rank={self.stages_per_rank}: pairs are of 1f1b with one stage "
                "a rank; take dualpipe_v, which pairs with two, or leave it out"
            )
        return self

    def build(self, ranks: int, microbatches: int) -> Schedule:
        if self.stages_per_rank == 1:
            return BUILDERS["1f1b"](
                ranks=ranks, microbatches=microbatches, zero_bubble=self.zero_bubble, paired=self.paired
            )
        name = "interleaved_zero_bubble" if self.zero_bubble else "interleaved_1f1b"
        options = {
            "stages_per_rank": self.stages_per_rank,
            "microbatch_group_size": self.microbatch_group_size,
        }
        return BUILDERS[name](ranks=ranks, microbatches=microbatches, **options)


class Interleaved1F1B(ScheduleConfig):
    schedule: Literal["interleaved_1f1b"]
    stages_per_rank: _StagesPerRank = 2
    microbatch_group_size: _GroupSize = None


class InterleavedZeroBubble(ScheduleConfig):
    schedule: Literal["interleaved_zero_bubble"]
    stages_per_rank: _StagesPerRank = 2
    microbatch_group_size: _GroupSize = None


class ZBH1(ScheduleConfig):
    schedule: Literal["zb_h1"]


class ZBH2(ScheduleConfig):
    schedule: Literal["zb_h2"]


class Hanayo(ScheduleConfig):
    schedule: Literal["hanayo"]
    waves: Annotated[_Count, Field(validation_alias=AliasChoices("waves", "num_waves"))] = 1


class _V(ScheduleConfig):
    """Two stages a rank, out and back. The number may be told; it can only be 2."""

    two: ClassVar[int] = 2
    stages_per_rank: _StagesPerRank = 2

    @model_validator(mode="after")
    def fits(self) -> Self:
        if self.stages_per_rank != self.two:
            raise ValueError(
                f"stages_per_rank={self.stages_per_rank}: {self.schedule} has two stages a rank; "
                "give 2, or leave it out"
            )
        return self

    @property
    def options(self) -> dict[str, Any]:
        return {name: value for name, value in super().options.items() if name != "stages_per_rank"}


class ZBV(_V):
    schedule: Literal["zb_v"]
    costs: _Costs = None


class VHalf(_V):
    schedule: Literal["v_half"]
    costs: _Costs = None


class VMin(_V):
    schedule: Literal["v_min"]
    costs: _Costs = None


class DualPipeV(_V):
    schedule: Literal["dualpipe_v"]


class DualPipe(ScheduleConfig):
    schedule: Literal["dualpipe"]


class Searched(ScheduleConfig):
    """The best that `penstock.schedule.search` finds for the costs and the memory limit."""

    schedule: Literal["searched"]
    placement: Literal["loop", "v"] = "loop"
    stages_per_rank: Annotated[_Count | None, Field(validation_alias=_STAGES_PER_RANK)] = None
    costs: _Costs = None
    memory_limit: Annotated[float, Field(gt=0)] | None = None  # in the unit of costs.activation
    objective: Literal["makespan", "extent"] = "makespan"
    seconds: Annotated[float, Field(gt=0)] = 30.0
    seed: Annotated[int, Field(ge=0)] = 0

    def build(self, ranks: int, microbatches: int) -> Schedule:
        from penstock.schedule.search import search

        return search(ranks=ranks, microbatches=microbatches, **self.options).schedule


class FromFile(ScheduleConfig):
    """One that `penstock.schedule.dump` or PyTorch wrote."""

    schedule: Literal["file"]
    path: str

    def build(self, ranks: int, microbatches: int) -> Schedule:
        from penstock.schedule.files import load

        return check_numbers(load(Path(self.path)), ranks, microbatches)


KnownConfig = Annotated[
    Inference | GPipe | LoopedBFS | OneFOneB | Interleaved1F1B | InterleavedZeroBubble | ZBH1 | ZBH2
    | Hanayo | ZBV | VHalf | VMin | DualPipeV | DualPipe | Searched | FromFile,
    Field(discriminator="schedule"),
]  # fmt: skip

CONFIGS: dict[str, type[ScheduleConfig]] = {
    get_args(config.model_fields["schedule"].annotation)[0]: config
    for config in get_args(get_args(KnownConfig)[0])
}


# ---- What schedules are called: their own names, and the spellings of other libraries and the papers.


# by letters and digits only
_ALIASES = {
    "afab": "gpipe",
    "allforwardallbackward": "gpipe",
    "pipedreamflush": "1f1b",
    "interleaved": "interleaved_1f1b",
    "zb1p": "zb_h1",
    "zbvzerobubble": "zb_v",
    "zerobubblev": "zb_v",
}
_SPELT = {re.sub(r"[^a-z0-9]", "", name): name for name in CONFIGS} | _ALIASES


def canonical(name: str) -> str:
    """The schedule's own name, from any of its spellings: 1F1B, afab, zero_bubble_v. Raises ConfigError."""
    key = re.sub(r"[^a-z0-9]", "", name.lower()).removeprefix("schedule")
    if key in _SPELT:
        return _SPELT[key]
    near = difflib.get_close_matches(key, _SPELT, n=1)
    known = ", ".join(CONFIGS)
    remedy = f"Did you mean {_SPELT[near[0]]!r}?" if near else "Take one of these"
    raise ConfigError(f"schedule {name!r}", f"the known schedules are {known}", remedy)


# ---- The schedule that is chosen: by a name and options, by a config or its mapping, or given as it is.


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
