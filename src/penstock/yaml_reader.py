"""YAML as people mean it, within limits.

PyYAML reads YAML 1.1, where 1:30 is 90, 017 is 15 and 1e-3 is text. Here numbers are those of YAML 1.2; yes,
no, on and off stay booleans. A date is text, and a key given twice is an error. A few lines may expand to a
huge value: ten nested lists of ten aliases each make ten thousand million values.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from penstock.errors import ConfigError
from penstock.reading import DEEPEST, read_text, size

LARGEST = 256 * 1024  # bytes of a file, which PyYAML takes seconds to parse
_EXPANDED = 1 << 20  # characters and values, with each alias counted as its expansion
_DIGITS = 100  # of a number
_TAG = "tag:yaml.org,2002:"
_NUMBERS = (f"{_TAG}int", f"{_TAG}float")
_UNWRITABLE = re.compile("[\0\ud800-\udfff]")
_PLAIN = {f"{_TAG}{name}" for name in ("null", "bool", "int", "float", "str", "seq", "map")}
_INT = re.compile(r"([-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$")
_FLOAT = re.compile(
    r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"
)


def read_yaml(path: Path, kind: str) -> Any:
    """What a file of YAML holds.

    kind: what the file is, as errors name it: config, cluster

    Raises ConfigError where it cannot be read, and where it is not YAML.
    """
    try:
        return parse_yaml(read_text(path, LARGEST))
    except OSError as error:
        rule = f"the {kind} file cannot be read ({error.strerror})"
        remedy = f"Give the path of a YAML file of at most {size(LARGEST)}"
        raise ConfigError(f"{kind} {path}", rule, remedy) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{kind} {path}", f"it is not YAML: {in_a_line(error)}", "Fix that line") from None


def in_a_line(error: Exception) -> str:
    return " ".join(str(error).split())[:500]


def parse_yaml(text: str) -> Any:
    """What a text of YAML holds: plain values only. Raises yaml.YAMLError."""
    try:
        return yaml.load(text, _Loader)  # a SafeLoader: plain values only
    except (ValueError, KeyError) as error:  # PyYAML's, of a tag that does not fit, as in !!bool maybe
        raise yaml.YAMLError(f"a value is not what its tag says ({error})") from error


_refused = partial(yaml.MarkedYAMLError, None, None)  # takes what is wrong, and where


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {  # noqa: RUF012 - as in PyYAML
        first: [pair for pair in resolvers if pair[0] in (f"{_TAG}bool", f"{_TAG}null", f"{_TAG}merge")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    yaml_constructors = {  # noqa: RUF012 - as in PyYAML; without dates, sets and bytes, which no key takes
        tag: constructor
        for tag, constructor in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag in _PLAIN
    }

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = 0
        self._expanded: dict[yaml.Node, int] = {}  # by whole node

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        self._depth += 1
        if self._depth > DEEPEST:
            raise _refused(f"it nests deeper than {DEEPEST} levels", mark)
        is_alias = self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if is_alias and node not in self._expanded:
            raise _refused("an alias is within its own expansion", mark)
        if node is not None and not is_alias:
            self._expanded[node] = self._size(node, mark)
        return node

    def _size(self, node: yaml.Node, mark: yaml.Mark) -> int:
        if isinstance(node, yaml.ScalarNode):
            return 1 + len(node.value)
        pairs = isinstance(node, yaml.MappingNode)
        inner = [child for pair in node.value for child in pair] if pairs else node.value
        size = 1 + sum(self._expanded[child] for child in inner)
        if size > _EXPANDED:
            raise _refused(f"with its aliases expanded it has more than {_EXPANDED:,} characters", mark)
        return size

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        if node.tag in _NUMBERS and len(node.value) > _DIGITS:
            raise _refused(f"a number of more than {_DIGITS} digits", node.start_mark)
        if isinstance(node, yaml.ScalarNode) and _UNWRITABLE.search(node.value):
            rule = "a text with a NUL or half a surrogate pair, which no file can hold"
            raise _refused(rule, node.start_mark)
        return super().construct_scalar(node)

    def construct_integer(self, node: yaml.ScalarNode) -> int:
        text = self.construct_scalar(node)
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]  # PyYAML refuses the others
        known = set[str]()
        for key in keys:
            if key.value in known:
                raise _refused(f"key {key.value!r} is given twice", key.start_mark)
            known.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(_NUMBERS[0], _INT, list("-+0123456789"))
_Loader.add_implicit_resolver(_NUMBERS[1], _FLOAT, list("-+.0123456789"))
_Loader.add_constructor(_NUMBERS[0], _Loader.construct_integer)
