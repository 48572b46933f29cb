"""The types of config values that are more than a plain type."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from inspect import cleandoc, get_annotations
from operator import attrgetter
from typing import Annotated, Any, Literal, Self, Union, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    SerializerFunctionWrapHandler,
    Tag,
    model_serializer,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from penstock.options import (
    CheckpointingOptions,
    CompileOptions,
    OffloadingOptions,
    PaddingOptions,
    at_most,
)
from penstock.reading import path_fault


class Section(BaseModel):
    """Unknown keys are errors, and so is a value of another type: nothing is guessed."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False,
        ser_json_inf_nan="constants",  # a model's config may hold an infinity
    )  # fmt: skip

    @model_validator(mode="after")
    def checked(self) -> Self:
        self.check_keys()
        return self

    def check_keys(self) -> None:
        """Raise ValueError "rule; remedy" for keys that do not fit together."""

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """The schema, with what the section means: older pydantic leaves it out below a dataclass."""
        schema = handler(core_schema)
        handler.resolve_ref_schema(schema).setdefault("description", cleandoc(cls.__doc__ or ""))
        return schema

    @classmethod
    def keys_in_order(cls) -> list[str]:
        """The section's own keys, then those that it shares with AutoPipeline."""
        sections = [owner for owner in reversed(cls.__mro__) if issubclass(owner, Section)]
        keys = [key for section in sections for key in get_annotations(section) if key in cls.model_fields]
        return list(dict.fromkeys((*keys, *cls.model_fields)))

    @model_serializer(mode="wrap")
    def _in_order(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = write(self)
        return {key: values[key] for key in self.keys_in_order()}


def _ranks(count: int) -> int:
    if count < 1 and count != -1:
        raise ValueError(f"{count} is no number of ranks; write 1 or more, or -1 for all that are left")
    return count


def _path(text: str) -> str:
    if fault := path_fault(text):
        shown = repr(text if len(text) < 60 else f"{text[:57]}...")
        raise ValueError(f"{shown}: {fault}; write it out, or . for the working folder")
    return text


PathText = Annotated[str, AfterValidator(_path)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Length = Annotated[int, Field(ge=2), at_most(10**12)]  # tokens: the first one of a row predicts nothing
Seconds = Annotated[float, Field(gt=0), at_most(10**8)]
RankCount = Annotated[int, AfterValidator(_ranks)]
Dtype = Literal["float32", "bfloat16", "float16"]


def only(section: Section, wanted: Mapping[str, Collection[object]], message: str, **words: str) -> None:
    """Raise ValueError for the first key that has none of its wanted values.

    Args:
        wanted: values by key; a key of a section below has a dot
        message: rule; remedy, of {key}, {value} and `words`
    """
    for key, values in wanted.items():
        if (value := attrgetter(key)(section)) not in values:
            raise ValueError(message.format(key=key, value=value, **words))


# ---- an option that is off, on, or on with keys of its own


def _switch(section: type[Section], complaint: str, **words: Mapping[str, object]) -> BeforeValidator:
    """Read true, false, a word or a mapping as the keys of `section`, or as None for an option that is off.

    Anything else is refused here, once: a union would raise an error for each of its types.

    words: the keys that each word is short for
    """

    def keys(value: object) -> object:
        if value is None or value is False or value == "none":
            return None
        if value is True or isinstance(value, dict | Section):
            return {} if value is True else value
        if isinstance(value, str) and value in words:
            return words[value]
        raise ValueError(f"{value!r} {complaint}")

    said: Any = bool | Literal[tuple(words)] if words else bool
    return BeforeValidator(keys, json_schema_input_type=said | section | None)


# ---- one of several sections, by its name


def tag(name: object) -> str:
    """The tag of a union's member, with which an error names this member's keys only. No key is called so."""
    return f"of {name}"


def tag_by(key: str, default: str = "") -> Callable[[Any], str]:
    """The tag of a section, or of the mapping that it is read from. key: of its name; default: without one"""

    def tag_of(section: Any) -> str:
        return tag(section.get(key, default) if isinstance(section, dict) else getattr(section, key))

    return tag_of


@dataclass(frozen=True)
class OneOf:
    """Annotates a union of sections, perhaps with None: a name alone stands for the section's defaults.

    Anything else that names no member is refused here: pydantic's words for a union are unclear.

    Attributes:
        key: of the name
        sections: the members, by name
        complaint: what is wrong with other values, and the remedy
    """

    key: str
    sections: Mapping[str, type[Section]]
    complaint: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        members = tuple(Annotated[section, Tag(tag(name))] for name, section in self.sections.items())
        union: Any = Annotated[Union[members], Discriminator(tag_by(self.key))]  # noqa: UP007
        written = source | Literal[tuple(self.sections)]
        if type(None) in get_args(source):
            union = union | None
        read = BeforeValidator(self._read, json_schema_input_type=written)
        return handler.generate_schema(Annotated[union, read])

    def _read(self, value: object) -> object:
        section = {self.key: value} if isinstance(value, str) else value
        is_named = isinstance(section, dict) and section.get(self.key) in list(self.sections)
        if section is None or isinstance(section, Section) or is_named:
            return section
        raise ValueError(f"{value!r} {self.complaint}")


class PaddingSection(Section, PaddingOptions):
    """How long rows become with pipeline.shapes=padded: as the longest of each step, if left out."""


class CheckpointingSection(Section, CheckpointingOptions):
    """Which activations are computed again in the backward: all but `save` of every `every`-th layer."""


class OffloadingSection(Section, OffloadingOptions):
    """Which activations wait in host memory between forward and backward."""


class CompileSection(Section, CompileOptions):
    """What torch.compile compiles, and how."""


CheckpointingValue = Annotated[
    CheckpointingSection | None,
    _switch(
        CheckpointingSection,
        "is no way to recompute activations; write true, false, none, full, selective, or a mapping such as "
        "{every: 2}",
        full={},
        selective={"save": ["matmul", "attention"]},
    ),
]
OffloadingValue = Annotated[
    OffloadingSection | None,
    _switch(
        OffloadingSection,
        "does not say what is offloaded; write true, false, or a mapping, as {modules: [mlp]}",
    ),
]
CompileValue = Annotated[
    CompileSection | None,
    _switch(
        CompileSection,
        "does not say what torch.compile compiles; write true, false, layers, loss, or a mapping such as "
        "{backend: inductor}",
        layers={"loss": False},
        loss={"layers": "none"},
    ),
]
