"""YAML as people mean it: 1e-3 is a number, and a key given twice is an error."""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml


def parse(text: str) -> Any:
    """The value that the YAML `text` stands for. Raises yaml.YAMLError."""
    return yaml.load(text, _Loader)  # a SafeLoader: plain values only


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key.value!r} is given twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


# YAML 1.1, which PyYAML reads, wants a dot in a number with an exponent; YAML 1.2 and everybody else do not.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+"), list("-+0123456789")
)
