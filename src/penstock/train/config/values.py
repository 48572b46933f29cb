"""The types of the config's values, where they are more than a plain type."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)

from penstock.errors import ConfigError, PartitionError
from penstock.reading import parse_size, path_fault
from penstock.schedule.layout import read_layout


class Section(BaseModel):
    """Unknown keys are errors, and so is a value of another type: nothing is guessed."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False,
        ser_json_inf_nan="constants",  # of a model's config, which may hold an infinity
    )  # fmt: skip

    @model_validator(mode="after")
    def checked(self) -> Self:
        self.check_keys()
        return self

    def check_keys(self) -> None:
        """Raise ValueError "rule; remedy" for keys that do not fit together."""


@contextmanager
def as_finding() -> Iterator[None]:
    """Turn such an error into a ValueError "rule; remedy", the only exception that pydantic collects."""
    try:
        yield
    except (ConfigError, PartitionError) as error:
        raise ValueError(f"{error.value}: {error.rule}; {error.remedy}") from error


def _ranks(number: int) -> int:
    if number < 1 and number != -1:
        raise ValueError(f"{number} is no number of ranks; write 1 or more, or -1 for all that are left")
    return number


def _path(text: str) -> str:
    if fault := path_fault(text):
        shown = repr(text if len(text) < 60 else f"{text[:57]}...")
        raise ValueError(f"{shown}: {fault}; write it out, or . for the working folder")
    return text


def _at_most(most: float) -> AfterValidator:
    """Refuse what no run has, and clocks, seeds and loops choke on. No limit that a page needs to show."""

    def check(value: float) -> float:
        if value > most:
            raise ValueError(f"{value:.4g} is more than any run has; give {most:,} or less")
        return value

    return AfterValidator(check)


PathText = Annotated[str, AfterValidator(_path)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=1), _at_most(10**12)]
Length = Annotated[int, Field(ge=2), _at_most(10**12)]  # tokens: the first one of a row predicts nothing
Natural = Annotated[int, Field(ge=0), _at_most(2**63 - 1)]
Seconds = Annotated[float, Field(gt=0), _at_most(10**8)]
SmallNatural = Annotated[int, Field(ge=0), _at_most(10**4)]
Patterns = Annotated[tuple[str, ...], Field(strict=False)]  # YAML knows lists only
Ranks = Annotated[int, AfterValidator(_ranks)]
Dtype = Literal["float32", "bfloat16", "float16"]


def _one_or_several(expected: str, refused: tuple[object, ...]) -> Callable[[object], object]:
    """Accept a number from 0 on, a list of them, or None. For a union pydantic complains once a member."""

    def check(value: object) -> object:
        numbers = value if isinstance(value, list | tuple) else () if value is None else (value,)
        if not all(type(number) is int and number >= 0 for number in numbers) or value in refused:
            raise ValueError(f"{value!r} is neither {expected}")
        return tuple(value) if isinstance(value, list) else value

    return check


_layers_per_stage = _one_or_several(
    "a number of layers nor a list of one for each stage; write 4, or [4, 4, 3]", (0, [], ())
)
_in_flight = _one_or_several(
    "a number of microbatches nor a list of one for each rank; write 2, or [2, 1, 0, 0]", ([], ())
)


def _bytes(value: object) -> object:
    """Bytes from a number, or from text with a unit, such as 8 GiB."""
    size = parse_size(value) if isinstance(value, str) else value
    if value is None:
        return None
    if isinstance(size, int | float) and not isinstance(size, bool) and 0 < size < float("inf"):
        return float(size)
    raise ValueError(f"{value!r} is no number of bytes; write 8 GiB, or 8589934592")


def _layout(value: object) -> object:
    """A layout, checked here, as a union's complaints would hide what is wrong with it."""
    if value is None:
        return None
    if not isinstance(value, str | list | tuple):
        raise ValueError(f"{value!r} is no layout; write Ett|ttL, or a list of names for each stage")
    with as_finding():
        read_layout(value)
    return value if isinstance(value, str) else tuple(tuple(stage) for stage in value)


LayoutValue = Annotated[str | tuple[tuple[str, ...], ...] | None, BeforeValidator(_layout)]
LayersPerStage = Annotated[int | tuple[int, ...] | None, BeforeValidator(_layers_per_stage)]
InFlight = Annotated[int | tuple[int, ...] | None, BeforeValidator(_in_flight)]
Bytes = Annotated[float | None, BeforeValidator(_bytes, json_schema_input_type=float | str | None)]


class CheckpointingSection(Section):
    """Which activations are computed again in the backward: of every `every`-th layer, all but `save`."""

    every: Count = 1  # 2: every second one
    save: Patterns = ()  # what is kept all the same: matmul, attention, or names of torch's ops
    in_flight: InFlight = None  # only the first so many of a rank's microbatches in flight; a list: by rank
    memory_limit: Bytes = None  # a rank's, which chooses in_flight: bytes, or text like 8 GiB

    def check_keys(self) -> None:
        if self.in_flight is not None and self.memory_limit is not None:
            raise ValueError("memory_limit chooses in_flight, and here both are given; leave one of them out")


class OffloadingSection(Section):
    """Which activations wait in host memory between forward and backward."""

    modules: Patterns = ()  # what these modules of a layer save, as mlp or "*norm*"; none: all of each layer
    layers: Count | None = None  # the first so many of each stage; null: all
    # ops of a rank in whose time a copy should be over: with more, a slow link holds up less, and more
    # microbatches lie on the device
    ahead: Count = 1
    min_bytes: Natural = 2**20  # smaller tensors stay on the device


def _mode(words: tuple[str, ...], complaint: str) -> BeforeValidator:
    """Accept true, false, a mapping, or one of the words, where none is that for false.

    What is neither is refused here, once.
    """

    def check(value: object) -> object:
        if isinstance(value, bool | dict | Section) or value in words:
            return False if value == "none" else value
        raise ValueError(f"{value!r} {complaint}")

    return BeforeValidator(check)


# tags, so that an error in a mapping names its key, and not all the modes that it is not
_MODE_OR_SETTINGS = Discriminator(lambda value: "settings" if isinstance(value, dict | Section) else "mode")

OffloadingValue = Annotated[
    Annotated[bool, Tag("mode")] | Annotated[OffloadingSection, Tag("settings")],
    _MODE_OR_SETTINGS,
    _mode((), "does not say what is offloaded; write true, false, or a mapping, as {modules: [mlp]}"),
]
CheckpointingValue = Annotated[
    Annotated[bool | Literal["full", "selective"], Tag("mode")]
    | Annotated[CheckpointingSection, Tag("settings")],
    _MODE_OR_SETTINGS,
    _mode(
        ("none", "full", "selective"),
        "is no way to recompute activations; write true, false, none, full, selective, or a mapping such as "
        "{every: 2}",
    ),
]


class CompileSection(Section):
    """What torch.compile compiles, and how."""

    # auto: whole, or with a schedule that splits backwards around the products where that can be; whole: each
    # layer; products: around its products, whose weight gradients can then be put off
    layers: Literal["auto", "whole", "products", "none"] = "auto"
    loss: bool = True  # the loss of whole logits; not that of large ones, see chunked_loss
    backend: str = "inductor"  # as torch.compile takes it: inductor, aot_eager, cudagraphs, ...
    mode: str | None = None  # as there: default, reduce-overhead, max-autotune, ...
    dynamic: bool | None = None  # whether lengths are dynamic; null: once a second one comes


CompileValue = Annotated[
    Annotated[bool | Literal["layers", "loss"], Tag("mode")] | Annotated[CompileSection, Tag("settings")],
    _MODE_OR_SETTINGS,
    _mode(
        ("none", "layers", "loss"),
        "does not say what torch.compile compiles; write true, false, layers, loss, or a mapping such as "
        "{backend: inductor}",
    ),
]
