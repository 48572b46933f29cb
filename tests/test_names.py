"""Names of the source: none that says nothing of what it names, and no type's name that has two meanings."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

from support.syntax import IN_ONE_WORKER, trees

pytestmark = IN_ONE_WORKER

REFUSED = frozenset({"found"})  # say what was found
_TYPE = re.compile(r"[A-Z](?=\w*[a-z])[A-Za-z0-9]*")  # CapWord; neither a constant nor private


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
        f"{module}:{line} {name}"
        for module, tree in trees().items()
        for line, name in bound(tree)
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


def types(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Each public class and CapWord alias of a file's top level, under `if` and `try` too, with its line."""
    nodes: list[ast.AST] = [tree]
    while nodes:
        for node in ast.iter_child_nodes(nodes.pop()):
            match node:
                case ast.ClassDef(name=name):
                    named = [name]
                case ast.Assign(targets=targets):
                    named = [target.id for target in targets if isinstance(target, ast.Name)]
                case ast.AnnAssign(target=ast.Name(id=name)):
                    named = [name]
                case ast.If() | ast.Try() | ast.ExceptHandler():
                    nodes.append(node)
                    continue
                case _:
                    continue
            yield from ((node.lineno, name) for name in named if _TYPE.fullmatch(name))


def ambiguous(files: Iterable[tuple[str, ast.Module]]) -> list[str]:
    """Each type name that several of the files, given as name and tree, define; with all its places."""
    places: dict[str, dict[str, int]] = defaultdict(dict)
    for path, tree in files:
        for line, name in types(tree):
            places[name].setdefault(path, line)
    return [
        f"{name}: {', '.join(f'{path}:{line}' for path, line in lines.items())}"
        for name, lines in sorted(places.items())
        if len(lines) > 1
    ]


def test_a_type_name_has_one_meaning() -> None:
    """Who reads `Batch` need not look up which. A word that is taken gets another before it: `P2PBatch`."""
    assert ambiguous(trees().items()) == []


def said_of(files: Iterable[tuple[str, str]]) -> list[str]:
    return ambiguous((name, ast.parse(source)) for name, source in files)


def test_a_second_definition_of_a_type_name_is_seen() -> None:
    first = "class Batch: pass\n"
    ways = (
        "class Batch(tuple): pass", "Batch = list[int]", "Batch: TypeAlias = 'list[int]'",
        "A = Batch = list[int]", "if TYPE_CHECKING:\n Batch = int",
        "try:\n pass\nexcept ImportError:\n Batch = int",
    )  # fmt: skip
    assert [way for way in ways if not said_of([("a.py", first), ("b.py", f"\n{way}")])] == []
    two = [("a.py", first), ("b.py", f"\n{ways[0]}")]
    assert said_of(two) == ["Batch: a.py:1, b.py:2"]

    others = (
        "from a import Batch", "class _Batch: pass", "BATCH = 1", "B = TypeVar('B')",
        "def f():\n class Batch: pass", "class Other:\n Batch = int", "Batch.size = 1", "batch = 1",
    )  # fmt: skip
    planted = [(f"{number}.py", f"{way}\n{way}") for number, way in enumerate(others)]
    assert said_of([("a.py", first), *planted]) == []
