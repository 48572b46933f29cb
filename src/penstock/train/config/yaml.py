"""YAML as people mean it: 1e-3 is a number, a day is text, and a key given twice is an error."""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml


def parse(text: str) -> Any:
    """The value that the YAML `text` stands for. Raises yaml.YAMLError."""
    try:
        return yaml.load(text, _Loader)  # a SafeLoader: plain values only
    except ValueError as error:  # PyYAML's own, of what looks like a number and is none, such as 0x_
        raise yaml.YAMLError(str(error)) from error


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {  # noqa: RUF012 - as PyYAML has it
        first: [each for each in resolvers if each[0] != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue  # a list or a mapping, which is refused below
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
