"""Names of the source: none that says nothing of what it names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import penstock

SOURCE = Path(penstock.__file__).parent
REFUSED = frozenset({"found"})  # say what was found


def bound(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Each name that the code gives to something, with its line."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield node.lineno, name
            case ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name
            case ast.alias(asname=str(name)):
                yield node.lineno, name
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield node.lineno, name
            case ast.ExceptHandler(name=str(name)):
                yield node.lineno, name


def test_names_say_what_they_name() -> None:
    wrong = [
        f"{path.relative_to(SOURCE)}:{line} {name}"
        for path in sorted(SOURCE.rglob("*.py"))
        for line, name in bound(ast.parse(path.read_text(encoding="utf-8")))
        if name in REFUSED
    ]
    assert wrong == []


def test_every_way_to_give_a_name_is_seen() -> None:
    ways = (
        "found = 1", "for found in []: pass", "(found := 1)", "[0 for found in []]", "def f(found): pass",
        "lambda found: 0", "def found(): pass", "class found: pass", "import os as found", "self.found = 1",
        "with open('') as found: pass", "match 1:\n case found: pass", "match []:\n case [*found]: pass",
        "try:\n pass\nexcept E as found: pass", "found: int = 1", "found += 1",
    )  # fmt: skip
    assert [way for way in ways if "found" not in {name for _, name in bound(ast.parse(way))}] == []
