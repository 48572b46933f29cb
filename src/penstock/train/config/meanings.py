"""What each key of a config means: the comment that stands behind it in the source, or above it.

For an option that AutoPipeline has too it is the sentence in penstock.options. docs/config.md and the schema
for editors are written from them.
"""

from __future__ import annotations

import ast
import inspect
import io
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import is_dataclass
from functools import cache
from typing import NamedTuple

from penstock.options import sentences
from penstock.train.config.values import Section


class Meaning(NamedTuple):
    """Of a key. group: the comment over it and over those after it, which ends with a colon"""

    group: str
    means: str


def section_of(name: str) -> type[Section]:
    """The section whose class has this name."""
    known = [Section]
    for section in known:
        known += section.__subclasses__()
    return next(section for section in known if section.__name__ == name)


def meanings_of(section: type[Section]) -> dict[str, Meaning]:
    """By key."""
    owners = [owner for owner in reversed(section.__mro__) if owner is not Section]
    meanings = {key: of for owner in owners if issubclass(owner, Section) for key, of in _comments(owner)}
    for owner in owners:
        if is_dataclass(owner) and not issubclass(owner, Section):
            for key, sentence in sentences(owner).items():
                group, own = meanings.get(key, ("", ""))
                meanings[key] = Meaning(group, own or sentence)
    return meanings


def _comments(section: type[Section]) -> Iterator[tuple[str, Meaning]]:
    """Each key that the class names."""
    lines, comments, classes = _source(section.__module__)
    group = ""
    for node in classes[section.__name__].body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        first = node.lineno
        while lines[first - 2].lstrip().startswith("#"):
            first -= 1
        above = " ".join(comments[line] for line in range(first, node.lineno))
        assert node.end_lineno is not None
        own = [comments[line] for line in range(node.lineno, node.end_lineno + 1) if line in comments]
        if above.endswith(":"):
            group, above = above, ""
        yield node.target.id, Meaning(group, " ".join([above, *own]).strip())


@cache
def _source(module: str) -> tuple[list[str], dict[int, str], dict[str, ast.ClassDef]]:
    """Its lines, its comments by line, and its classes by name."""
    source = inspect.getsource(sys.modules[module])
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {of.start[0]: of.string.lstrip("# ") for of in tokens if of.type == tokenize.COMMENT}
    classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    return source.splitlines(), comments, classes
