"""What is wrong with a value of a config or of a cluster, in the user's words.

pydantic reads them. It collects what it refuses; each finding becomes value, rule and remedy, and all of a
file one ConfigError.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from penstock.errors import ConfigError, PartitionError

# what to write in place of a value that pydantic refuses, by the type of its finding
_REMEDIES = {
    **dict.fromkeys(("int_type", "int_from_float", "int_parsing"), "Write a whole number, such as 8"),
    **dict.fromkeys(("float_type", "float_parsing", "finite_number"), "Write a number, such as 0.1"),
    **dict.fromkeys(("tuple_type", "too_short", "too_long"), "Write a list, such as [a, b]"),
    "string_type": "Write text, in quotes where it looks like something else",
    "bool_type": "Write true or false",
    "literal_error": "Take {expected}",
    "greater_than_equal": "Give {ge} or more",
    "less_than_equal": "Give {le} or less",
    "greater_than": "Give more than {gt}",
    "less_than": "Give less than {lt}",
}
_SHOWN = 20  # findings in an error
Finding = tuple[str, str, str]  # value, rule and remedy


@contextmanager
def as_finding() -> Iterator[None]:
    """Turn a ConfigError or PartitionError into a ValueError, the only exception that pydantic collects."""
    try:
        yield
    except (ConfigError, PartitionError) as error:
        raise ValueError(f"{error.value}: {error.rule}; {error.remedy}") from error


def finding(entry: Any, name: str, otherwise: str) -> Finding:
    """A finding of pydantic in the user's words.

    entry: one of `ValidationError.errors()`
    name: of the key, with the keys that lead to it
    otherwise: the remedy of a finding that has none here
    """
    if entry["type"] == "value_error":  # a validator of ours: "rule; remedy"
        rule, _, remedy = str(entry["ctx"]["error"]).partition("; ")
        remedy = remedy or "fix one of them"
        return name, rule, remedy[0].upper() + remedy[1:]
    rule = entry["msg"].replace("Input should", "it should")
    remedy = _REMEDIES.get(entry["type"], otherwise)
    return f"{name}={shown(entry['input'])}", rule, remedy.format(**entry.get("ctx", {}))


def as_one(source: str, findings: Sequence[Finding]) -> ConfigError:
    """One error with everything that is wrong with `source`."""
    if len(findings) == 1:
        return ConfigError(*findings[0])
    lines = "".join(f"\n  {value}: {rule}. {remedy}" for value, rule, remedy in findings[:_SHOWN])
    lines += f"\n  and {len(findings) - _SHOWN} more" if len(findings) > _SHOWN else ""
    return ConfigError(source, f"{len(findings)} things are wrong with it:{lines}", "Fix each of them")


def shown(value: object) -> str:
    """A value as errors show it, cut where it is long."""
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
