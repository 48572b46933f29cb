"""Private names of other libraries stand in `penstock.private` only, and installed versions have them.

A test that uses a private name of penstock itself says why in a comment.
"""

from __future__ import annotations

import ast
import inspect
import io
import pkgutil
import re
import subprocess
import sys
import tokenize
import types
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import private
from support.syntax import IN_ONE_WORKER
from support.syntax import trees as all_trees

pytestmark = IN_ONE_WORKER

LIBRARIES = {
    "torch",
    "transformers",
    "torchao",
    "peft",
    "accelerate",
    "safetensors",
    "trl",
    "datasets",
    "numpy",
}
# of tuples with names and of os: Python documents them, in spite of their names
DOCUMENTED = {"_asdict", "_exit", "_fields", "_make", "_replace"}
# what penstock puts on modules of others
PUT_ON = {
    "_by_liger",
    "_checkpointing",
    "_compute_dtype",
    "_expert_share",
    "_makers",
    "_offload",
    "_prediction_ties",
    "_rng",
    "_rng_name",
    "_router",
    "_timing",
    "_whole_dtype",
}
LISTED = {name for names in private.ATTRIBUTES.values() for name in names}
ASKS = {"getattr", "hasattr", "setattr", "delattr"}
HERE = "penstock.private"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def is_hidden(path: str) -> bool:
    """Whether a dotted path has a private segment."""
    return any(map(is_private, re.split(r"[.:]", path)))


def is_module(text: str) -> bool:
    """Whether a string is a private path of a library, as for `sys.modules`."""
    return bool(re.fullmatch(r"\w+([.:]\w+)+", text)) and of_libraries(text) and is_hidden(text)


def of_libraries(path: str) -> bool:
    return path.split(".")[0] in LIBRARIES


@cache
def nodes(tree: ast.AST) -> list[ast.AST]:
    return list(ast.walk(tree))


def imports(tree: ast.AST) -> Iterator[tuple[str, str, int]]:
    """Local name, path and line of all that a file imports from the libraries."""
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            paths = [(alias.asname or alias.name.split(".")[0], alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            paths = [(alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names]
        else:
            continue
        yield from ((name, path, node.lineno) for name, path in paths if of_libraries(path))


def dotted(node: ast.expr) -> str | None:
    """``a.b.c`` of names alone."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := dotted(node.value)) is not None:
        return f"{before}.{node.attr}"
    return None


def roots(tree: ast.AST) -> dict[str, str]:
    """What local names stand for: paths in the libraries, also as ``aten = torch.ops.aten``."""
    known = {name: path for name, path, _ in imports(tree)}
    for node in nodes(tree):  # `import torch.distributed` binds torch, unless it says `as`
        if isinstance(node, ast.Import):
            tops = {alias.name.split(".")[0] for alias in node.names if alias.asname is None}
            known |= {top: top for top in tops & LIBRARIES}
    for node in nodes(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            first, _, rest = (dotted(node.value) or "").partition(".")
            if rest and first in known:
                known[node.targets[0].id] = f"{known[first]}.{rest}"
    return known


def paths(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every private path into a library, with its line: imports, attributes, and names of modules."""
    yield from ((path, line) for _, path, line in imports(tree) if is_hidden(path))
    known = roots(tree)
    for node in nodes(tree):
        if isinstance(node, ast.Attribute) and (chain := dotted(node)) is not None:
            first, _, rest = chain.partition(".")
            path = f"{known.get(first, '')}.{rest}"
            if first in known and any(is_private(name) and name not in LISTED for name in path.split(".")):
                yield path, node.lineno
        elif isinstance(node, ast.Constant) and is_module(str(node.value)):
            yield str(node.value), node.lineno


def attributes(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every private attribute that a file reads or sets, by a dot, `getattr` and its like, or in a table."""
    for node in nodes(tree):
        names: list[Any] = []
        if not isinstance(node, ast.expr):
            continue
        if isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ASKS:
            names = [argument.value for argument in node.args[1:2] if isinstance(argument, ast.Constant)]
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            names = [node.slice.value]
        yield from ((name, node.lineno) for name in names if isinstance(name, str) and is_private(name))


def defined(tree: ast.AST) -> Iterator[str]:
    """Names that a file gives to something of its own."""
    for node in nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and dotted(node) == f"self.{node.attr}"
        ):
            yield node.attr


@cache
def trees() -> dict[str, ast.Module]:
    """The other files' source by module. Read by the tests alone: each test process imports this file."""
    return {name: tree for name, tree in all_trees().items() if name != HERE}


@cache
def ours() -> frozenset[str]:
    """The private names that are no library's."""
    return frozenset({name for tree in trees().values() for name in defined(tree)} | DOCUMENTED | PUT_ON)


def wrong(tree: ast.AST) -> list[str]:
    """Private names of others in a file, each with its line."""
    unlisted = [(name, line) for name, line in attributes(tree) if name not in LISTED | ours()]
    return sorted({f"{line}: {name}" for name, line in (*paths(tree), *unlisted)})


def test_private_names_stand_in_one_file() -> None:
    found = [f"{name}:{each}" for name, tree in trees().items() for each in wrong(tree)]
    assert not found, "put these into penstock/private.py:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from torch.utils._pytree import tree_map", "torch.utils._pytree.tree_map"),
        ("from torch.overrides import _get_overloaded_args as args", "torch.overrides._get_overloaded_args"),
        ("import torch._dynamo", "torch._dynamo"),
        ("def late():\n  from transformers.utils import _LazyModule", "transformers.utils._LazyModule"),
        ("import torch\ntorch._C.Node", "torch._C.Node"),
        ("import torch.distributed as dist\ndist.x._y()", "torch.distributed.x._y"),
        ("from torch import Tensor\nTensor._make_subclass()", "torch.Tensor._make_subclass"),
        ("import torch\naten = torch.ops.aten\naten._to_copy", "torch.ops.aten._to_copy"),
        ("import torch\ntorch._C._version", "torch._C._version"),
        ("import sys\nsys.modules.get('torch._dynamo')", "torch._dynamo"),
        ("def f(x):\n  return x._unheard_of", "_unheard_of"),
        ("def f(x):\n  return getattr(x, '_unheard_of', None)", "_unheard_of"),
        ("def f(x):\n  return vars(x)['_unheard_of']", "_unheard_of"),
    ],
)  # fmt: skip
def test_every_form_of_a_private_name_is_seen(source: str, found: str) -> None:
    assert found in [each.partition(": ")[2] for each in wrong(ast.parse(source))]


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.__version__",
        "from torch.autograd import forward_ad\nforward_ad._current_level",
        "def f(parameter):\n  return parameter._version",
        "def f(row):\n  return row._replace(a=1)",
        "'''torch._C is private'''",
    ],
)
def test_other_names_are_left_alone(source: str) -> None:
    assert wrong(ast.parse(source)) == []


def taken() -> set[str]:
    """The names that other files import from `penstock.private`."""
    return {
        alias.name
        for tree in trees().values()
        for node in nodes(tree)
        if isinstance(node, ast.ImportFrom) and node.module == HERE
        for alias in node.names
    }


def bindings() -> set[str]:
    """The names that the file binds, without what it imports for itself."""
    tree = ast.parse(Path(private.__file__).read_text(encoding="utf-8"))
    assigned = [node for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign)]
    targets = [node.targets[0] if isinstance(node, ast.Assign) else node.target for node in assigned]
    return {ast.unparse(target) for target in targets} - {"LATE", "ATTRIBUTES"} | private.LATE.keys()


def test_each_name_of_the_file_has_a_user_and_each_user_a_name() -> None:
    """The second half for those that are imported when they are asked for, which mypy cannot look up."""
    assert taken() == bindings()


def test_each_attribute_of_the_table_is_used() -> None:
    used = {name for tree in trees().values() for name, _ in attributes(tree)}
    used |= {node.value for tree in trees().values() for node in nodes(tree)
             if isinstance(node, ast.Constant) and isinstance(node.value, str)}  # fmt: skip
    assert sorted(LISTED - used) == []


@pytest.mark.parametrize("name", private.LATE)
def test_a_late_name_exists(name: str) -> None:
    """The others exist, or importing the file raises."""
    pytest.importorskip(private.LATE[name].partition(".")[0])
    assert getattr(private, name) is not None


def test_another_name_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match=r"'penstock\.private' has no attribute 'tree_mapp'"):
        _ = private.tree_mapp


def owners() -> list[Any]:
    return [pytest.param(owner, name, id=f"{owner}.{name}")
            for owner, names in private.ATTRIBUTES.items() for name in names]  # fmt: skip


@pytest.mark.parametrize(("owner", "name"), owners())
def test_an_attribute_exists(owner: str, name: str) -> None:
    """As one of the class or module, or in the source of its module: many are set in an `__init__`."""
    pytest.importorskip(re.split("[.:]", owner)[0])
    try:
        found = pkgutil.resolve_name(owner)
    except AttributeError:
        pytest.skip(f"this build of torch has no {owner}")
    home = found if isinstance(found, types.ModuleType) else sys.modules[found.__module__]
    exists = hasattr(found, name) or (hasattr(home, "__file__") and name in inspect.getsource(home))
    lacking = f"not in torch {torch.__version__[:4]}" in private.ATTRIBUTES[owner][name]
    assert exists is not lacking


# what needs no torch starts without it, and the rest imports no more than torch has
@pytest.mark.parametrize(
    "before",
    [
        "import penstock, penstock.schedule, penstock.launch.start, penstock.cli.main",
        "import torch, penstock.private",
    ],
)
def test_importing_the_file_imports_nothing_more(before: str) -> None:
    first = before.partition(", ")[0]
    script = (
        f"import sys; {first}; had = set(sys.modules); {before}; new = set(sys.modules) - had;"
        "print({name for name in new if name.partition('.')[0] in ('torch', 'transformers', 'safetensors')})"
    )
    command = [sys.executable, "-c", script]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert printed.stdout.strip() == "set()"


def of_penstock(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Every private name of penstock that a test file imports, reads, sets or patches, with its line."""
    others, here = set(roots(tree)), set(defined(tree))
    for node in nodes(tree):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom):
            if str(node.module).startswith("penstock"):
                names = [alias.name for alias in node.names]
            else:
                others |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute):
            root = (dotted(node) or "").partition(".")[0]
            names = [] if root in others or node.attr in here else [node.attr]
        elif isinstance(node, ast.Call | ast.Tuple):  # an owner and a name, as for `monkeypatch.setattr`
            parts = node.args if isinstance(node, ast.Call) else node.elts
            after = [part for before, part in pairwise(parts) if dotted(before) or is_path(before)]
            names = [str(part.value) for part in after if isinstance(part, ast.Constant)]
        yield from ((name, getattr(node, "lineno", 0)) for name in names if name in of_source())


def is_path(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and str(node.value).startswith("penstock.")


@cache
def of_source() -> frozenset[str]:
    """The private names that the source defines for itself alone."""
    names = {name for tree in trees().values() for name in defined(tree) if is_private(name)}
    return frozenset(names - DOCUMENTED - LISTED - PUT_ON - {"_"})


def commented(source: str, tree: ast.Module) -> set[int]:
    """The lines whose code has a comment: on the line itself, or above a statement around it."""
    notes = {
        token.start[0]: token.string
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT and not re.match(r"# (type:|fmt:|noqa)", token.string)
    }
    lines, explained = source.splitlines(), set(notes)
    for node in nodes(tree):
        if isinstance(node, ast.stmt):
            first = min([node.lineno, *(of.lineno for of in getattr(node, "decorator_list", []))])
            if first - 1 in notes and lines[first - 2].lstrip().startswith("#"):
                explained |= set(range(first, (node.end_lineno or first) + 1))
    return explained


def unexplained(source: str) -> list[str]:
    if of_source().isdisjoint(re.findall(r"\b_\w+", source)):
        return []  # most files: parsing them all takes seconds
    tree = ast.parse(source)
    uses = set(of_penstock(tree))
    explained = commented(source, tree) if uses else set()
    return sorted(f"{line}: {name}" for name, line in uses if line not in explained)


def test_a_test_says_why_it_uses_a_private_name_of_penstock() -> None:
    files = sorted(Path(__file__).parent.rglob("*.py"))
    wrong = [f"{path.name}:{line}" for path in files for line in unexplained(path.read_text("utf-8"))]
    assert not wrong, "use a public call, or say in a comment why not:\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    "source",
    [
        "pipe._world",
        "def f():\n  pipe._world.transport",
        "pipe._world = 1",
        "from penstock.pipeline.pipeline import _world",
        "monkeypatch.setattr(pipeline, '_world', 1)",
        "POINTS = (('penstock.pipeline', '_world'),)",
        "pipe._world  # type: ignore[attr-defined]",
        "# of another line\n\npipe._world",
        "a = 1  # of the line before\npipe._world",
    ],
)
def test_every_use_of_a_private_name_of_penstock_is_seen(source: str) -> None:
    assert [line.partition(": ")[2] for line in unexplained(source)] == ["_world"]


@pytest.mark.parametrize(
    "source",
    [
        "pipe._world  # which no result shows",
        "# which no result shows\npipe._world",
        "# which no result shows\n@decorated\ndef f():\n  x = 1\n  pipe._world",
        "import torch\ntorch.distributed._world",
        "from benchmarks import cost\ncost._world()",
        "class Own:\n  def f(self):\n    self._world = 1\n    return other._world",
        "pipe._replace(a=1)",
        "print('_world')",
    ],
)
def test_a_use_that_is_explained_or_of_another_is_let_pass(source: str) -> None:
    assert unexplained(source) == []
