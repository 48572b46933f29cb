"""pydantic's findings as one ConfigError, in the user's words."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, get_args

from pydantic import BaseModel, Tag, ValidationError

from penstock.errors import ConfigError

# tags in penstock.train.config.values and penstock.train.config.sections; no key bears such a name
BRANCHES = ("mode", "settings", "of adamw", "of muon")


def complain(error: ValidationError, model: type[BaseModel], source: str) -> ConfigError:
    """One ConfigError for everything in `error`, found while reading `source` into `model`."""
    found = [_finding(entry, model) for entry in error.errors(include_url=False)]
    if len(found) == 1:
        return ConfigError(*found[0])
    lines = "".join(f"\n  {value}: {rule}. {remedy}" for value, rule, remedy in found)
    rule = f"{len(found)} things are wrong with it:{lines}"
    return ConfigError(f"config {source}", rule, "Mend each of them")


def _finding(entry: Any, model: type[BaseModel]) -> tuple[str, str, str]:
    """Value, rule and remedy of one finding."""
    name = ".".join(_place(entry))
    match entry["type"]:
        case "extra_forbidden":
            return _unknown_key(entry, model)
        case "missing":
            return f"{name} is missing", "the run needs it", f"Write it into the config, or give {name}=..."
        case "value_error":  # our own cross-checks: "rule; remedy"
            rule, _, remedy = str(entry["ctx"]["error"]).partition("; ")
            section = name or "config"
            remedy = remedy or "mend one of them"
            return section, rule, remedy[0].upper() + remedy[1:]
    rule = entry["msg"].replace("Input should", "it should")
    return f"{name}={_shown(entry['input'])}", rule, _remedy(entry)


def _place(entry: Any) -> list[str]:
    """The keys that lead to a finding, without pydantic's names for the branches of a union."""
    return [str(part) for part in entry["loc"] if part not in BRANCHES]


def _remedy(entry: Any) -> str:
    """What to write instead, where pydantic's finding tells."""
    limits = entry.get("ctx", {})
    match entry["type"]:
        case "int_type" | "int_from_float" | "int_parsing":
            return "Write a whole number, such as 8"
        case "float_type" | "float_parsing" | "finite_number":
            return "Write a number, such as 0.1"
        case "string_type":
            return "Write text, in quotes where it looks like something else"
        case "bool_type":
            return "Write true or false"
        case "literal_error":
            return f"Take {limits['expected']}"
        case "greater_than_equal":
            return f"Give {limits['ge']} or more"
        case "less_than_equal":
            return f"Give {limits['le']} or less"
        case "greater_than":
            return f"Give more than {limits['gt']}"
        case "less_than":
            return f"Give less than {limits['lt']}"
        case "tuple_type" | "too_short" | "too_long":
            return "Write a list, such as [a, b]"
    return "See the keys and their types in penstock.train.config.sections"


def _unknown_key(entry: Any, model: type[BaseModel]) -> tuple[str, str, str]:
    *sections, key = _place(entry)
    known = _keys(model, entry["loc"][:-1])
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    where = ".".join(sections)
    elsewhere = [f"{name}.{key}" for name in model.model_fields if key in _keys(model, [name])]
    if near:
        remedy = f"Did you mean {'.'.join([*sections, near[0]])}?"
    elif elsewhere:
        remedy = f"Did you mean {elsewhere[0]}?"
    else:
        remedy = f"Take one of {', '.join(known)}"
    named = f"section {where}" if where else "a config"
    return f"{'.'.join([*sections, key])}={_shown(entry['input'])}", f"{named} has no such key", remedy


def _keys(model: type[BaseModel], place: Sequence[object]) -> list[str]:
    """Of the section at `place`, which has the names of branches in it; of all branches where it has not."""
    rest = [str(part) for part in place]
    found = [model]
    while rest and found:
        field = found[0].model_fields.get(rest.pop(0))
        inner = _sections_in(field.annotation) if field else {}
        branch = rest.pop(0) if rest and rest[0] in BRANCHES else ""
        found = [inner[branch]] if branch in inner else list(inner.values())
    return list(dict.fromkeys(key for section in found for key in section.model_fields))


def _sections_in(annotation: Any, branch: str = "") -> dict[str, type[BaseModel]]:
    """The sections that a key may hold, by the branches of a union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return {branch: annotation}
    tags = [each.tag for each in getattr(annotation, "__metadata__", ()) if isinstance(each, Tag)]
    found: dict[str, type[BaseModel]] = {}
    for part in get_args(annotation):
        found |= _sections_in(part, *tags)
    return found


def _shown(value: object) -> str:
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
