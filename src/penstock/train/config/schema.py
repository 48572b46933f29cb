"""The JSON schema of a config, with which an editor completes keys, shows what they mean and marks mistakes.

It is pydantic's, with the meaning of each key as its description. What keys must fulfil together stands in no
schema: `penstock train --dry-run` checks that.
"""

from __future__ import annotations

from typing import Any

from penstock.train.config.meanings import meanings_of, section_of
from penstock.train.config.sections import TrainConfig

_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema() -> dict[str, Any]:
    """The schema, as JSON."""
    schema = TrainConfig.model_json_schema()
    # of a union's members more than one may hold keys that all have
    schema["$defs"] = {name: _any_of(section) for name, section in schema["$defs"].items()}
    schema["properties"] = _any_of(schema["properties"])
    for section in (schema, *schema["$defs"].values()):
        if "properties" in section:
            _describe(section)
    return {"$schema": _DIALECT, **schema, "title": "A config of penstock train"}


def _describe(section: dict[str, Any]) -> None:
    """Write into each key of a section what it means."""
    meanings = meanings_of(section_of(section["title"]))
    for key, value in section["properties"].items():
        if key in meanings and (means := " ".join(meanings[key].means.split())):
            value["description"] = means


def _any_of(part: Any) -> Any:
    """`part` with anyOf in place of oneOf."""
    if isinstance(part, list):
        return [_any_of(inner) for inner in part]
    if not isinstance(part, dict):
        return part
    return {"anyOf" if key == "oneOf" else key: _any_of(inner) for key, inner in part.items()}
