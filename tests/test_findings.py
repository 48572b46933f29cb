"""What pydantic refuses becomes value, rule and remedy; all findings of a file are one error."""

from __future__ import annotations

from typing import Literal

import pytest
from pydantic import BaseModel, Field, ValidationError, field_validator

from penstock.errors import ConfigError
from penstock.findings import Finding, as_finding, as_one, finding, shown
from support.refusals import refuses


class Values(BaseModel):
    rows: int = Field(1, ge=1)
    rate: float = 0.1
    kind: Literal["text", "chat"] = "text"
    name: str = ""

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        with as_finding():
            if name == "nobody":
                raise ConfigError("name 'nobody'", "nobody has it", "Take another")
        return name


def findings_of(**values: object) -> list[Finding]:
    with pytest.raises(ValidationError) as caught:
        Values.model_validate(values)
    return [finding(entry, str(entry["loc"][0]), "Look at the page") for entry in caught.value.errors()]


@pytest.mark.parametrize(("values", "expected"), [
    ({"rows": 0}, ("rows=0", "it should be greater than or equal to 1", "Give 1 or more")),
    ({"rows": "many"}, ("rows='many'", "it should be a valid integer", "Write a whole number, such as 8")),
    ({"rate": []}, ("rate=[]", "it should be a valid number", "Write a number, such as 0.1")),
    ({"kind": "prose"}, ("kind='prose'", "it should be 'text' or 'chat'", "Take 'text' or 'chat'")),
    ({"name": "nobody"}, ("name", "name 'nobody': nobody has it", "Take another")),
])  # fmt: skip
def test_a_finding_has_value_rule_and_remedy(values: dict[str, object], expected: Finding) -> None:
    [(value, rule, remedy)] = findings_of(**values)
    assert (value, remedy) == (expected[0], expected[2])
    assert rule.startswith(expected[1])


def test_one_finding_is_the_error_itself() -> None:
    with refuses(ConfigError, "rows=0", "or equal to 1", "Give 1 or more"):
        raise as_one("a.yaml", findings_of(rows=0))


def test_several_findings_are_one_error_that_counts_them() -> None:
    with refuses(ConfigError, "a.yaml", "2 things are wrong with it:\n  rows=0", "Fix each"):
        raise as_one("a.yaml", findings_of(rows=0, kind="prose"))


def test_of_many_findings_the_rest_is_counted() -> None:
    error = as_one("a.yaml", [(f"key{index}", "it is unknown", "Leave it out") for index in range(23)])
    assert error.rule.startswith("23 things")
    assert error.rule.endswith("key19: it is unknown. Leave it out\n  and 3 more")


def test_a_long_value_is_cut() -> None:
    assert shown("a" * 58) == repr("a" * 58)
    assert shown("a" * 1000) == f"'{'a' * 56}..."
    assert shown([1, 2]) == "[1, 2]"
