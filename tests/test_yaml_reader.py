"""YAML as people mean it: numbers of YAML 1.2, keys once, small once expanded; else one error with the line.

`train/config/test_load.py` reads whole configs with it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from penstock.errors import ConfigError
from penstock.yaml_reader import LARGEST, parse_yaml, read_yaml
from support.refusals import refuses


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1:30", "1:30"), ("017", 17), ("1e-3", 0.001), ("0x1f", 31), ("2026-02-28", "2026-02-28"),
        ("on", True), ("[1, {a: .inf}]", [1, {"a": float("inf")}]),
    ],
)  # fmt: skip
def test_values_are_those_that_people_mean(text: str, value: object) -> None:
    assert parse_yaml(text) == value


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{a: 1, a: 2}", "given twice"),
        ("[" * 101 + "]" * 101, "nests deeper than 100"),
        ("&a [*a]", "an alias is within its own"),
        ("9" * 101, "more than 100 digits"),
        ("!!bool maybe", "not what its tag says"),
        (
            "\n".join(["- &a0 [0, 0]", *(f"- &a{n} [{f'*a{n - 1}, ' * 9}]" for n in range(1, 9))]),
            "aliases expanded",
        ),
    ],
)
def test_what_is_no_plain_small_yaml_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(yaml.YAMLError, match=complaint):
        parse_yaml(text)


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (None, "the cluster file cannot be read"),
        (b"a: [", "not YAML"),
        (b"\xff\xfe", "not YAML"),
        (b"#" * (LARGEST + 1), "more than 256 KiB"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_its_kind(
    tmp_path: Path, content: bytes | None, rule: str
) -> None:
    path = tmp_path / "cluster.yaml"
    if content is not None:
        path.write_bytes(content)
    with refuses(ConfigError, f"cluster {path}", rule):
        read_yaml(path, "cluster")
