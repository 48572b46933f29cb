"""The layering of the design: imports run downwards only, and schedules need no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock

PACKAGE = Path(penstock.__file__).parent

LAYERS = (
    {"cli"},
    {"train"},
    {"pipeline"},
    {"models", "parallel"},
    {"runtime"},
    {"schedule"},
)  # from the top down; those that share a line do not know each other
DEPTH = {name: depth for depth, layer in enumerate(LAYERS) for name in layer}

# The pipeline layer is a few modules at the top of the package rather than a folder.
PIPELINE = {
    "options", "parts", "wrapped", "functional", "provided", "steps", "evaluation", "clip", "measured",
    "summary", "split_model", "pipeline", "outline", "auto", "equivalence", "optimizer_state",
    "stored_optimizer", "checkpoint", "checkpoint_contents", "background", "cutting",
    "choices", "cutter", "fitting",
}  # fmt: skip

# Modules beside the layers: who may import them, and which modules they may import.
EVERYONE = frozenset(DEPTH)
HELPERS = {
    "errors": (EVERYONE | {"commit", "launch", "failures"}, frozenset[str]()),
    "commit": (frozenset({"pipeline", "train", "cli"}), frozenset({"errors"})),
    "launch": (frozenset({"train", "cli"}), frozenset({"errors", "commit", "failures"})),
    "failures": (frozenset({"launch"}), frozenset({"errors"})),
    "free_memory": (frozenset({"train", "cli"}), frozenset[str]()),
}

# file, line, what of penstock it imports: "schedule", or "" for the front door
Import = tuple[Path, int, str]


def part_of(path: Path) -> str:
    """The part of the package that a file belongs to."""
    return part_named(path.relative_to(PACKAGE).parts[0].removesuffix(".py"))


def part_named(module: str) -> str:
    if module == "__main__":  # `python -m penstock` is the command by another way
        return "cli"
    return "pipeline" if module in PIPELINE else module


def imported_names(node: ast.AST, path: Path) -> Iterator[str]:
    """The absolute names that an import statement may bind modules of."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            here = ("penstock", *path.relative_to(PACKAGE).parent.parts)
            base = ".".join([*here[: len(here) - node.level + 1], *filter(None, [base])])
        yield from (f"{base}.{alias.name}" for alias in node.names)


def without_type_checking(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node but those that only a type checker reads."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from without_type_checking(node)


def imports(path: Path) -> Iterator[Import]:
    """What a file imports of penstock; helpers may name others' types, layers may not."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = without_type_checking(tree) if part_of(path) in HELPERS else ast.walk(tree)
    for node in nodes:
        for name in imported_names(node, path):
            top, _, inside = name.partition(".")
            if top != "penstock":
                continue
            module = inside.split(".")[0]
            known = module and ((PACKAGE / module).is_dir() or (PACKAGE / f"{module}.py").is_file())
            yield path, getattr(node, "lineno", 0), part_named(module) if known else ""


def allowed(importer: str, imported: str) -> bool:
    if importer == imported:
        return True
    if imported == "":
        return importer == "cli"
    if importer == "__init__":
        return True
    if imported in HELPERS:
        return importer in HELPERS[imported][0]
    if importer in HELPERS:
        return imported in HELPERS[importer][1]
    return importer in DEPTH and imported in DEPTH and DEPTH[importer] < DEPTH[imported]


def source_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def test_every_module_has_its_place() -> None:
    """A new part of the package is entered above, in its layer or among the helpers."""
    parts = {part_of(path) for path in source_files()}
    assert parts - EVERYONE - HELPERS.keys() == {"__init__"}


def test_imports_run_downwards_only() -> None:
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line}: {part_of(path)} imports {imported or 'penstock itself'}"
        for source in source_files()
        for path, line, imported in imports(source)
        if not allowed(part_of(path), imported)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("importer", "imported", "fine"),
    [
        ("cli", "train", True),
        ("cli", "schedule", True),
        ("runtime", "schedule", True),
        ("schedule", "runtime", False),
        ("models", "parallel", False),
        ("train", "cli", False),
        ("schedule", "errors", True),
        ("errors", "schedule", False),
        ("pipeline", "commit", True),
        ("models", "commit", False),
        ("commit", "runtime", False),
        ("pipeline", "launch", False),
        ("train", "", False),
        ("cli", "", True),
        ("pipeline", "pipeline", True),
        ("__init__", "pipeline", True),
    ],
)
def test_the_rule_itself(importer: str, imported: str, fine: bool) -> None:
    assert allowed(importer, imported) == fine


def test_every_form_of_import_is_seen() -> None:
    source = (
        "import penstock.train\n"
        "from penstock import runtime, AutoPipeline\n"
        "from penstock.schedule.ops import Op\n"
        "from ..errors import InputError\n"
        "from . import ops\n"
        "def late():\n"
        "    from penstock.cli import main\n"
        "import os, penstockpile\n"
    )
    path = PACKAGE / "schedule" / "made_up.py"
    names = [name for node in ast.walk(ast.parse(source)) for name in imported_names(node, path)]
    assert {name for name in names if name.split(".")[0] == "penstock"} == {
        "penstock.train",
        "penstock.runtime",
        "penstock.AutoPipeline",
        "penstock.schedule.ops.Op",
        "penstock.errors.InputError",
        "penstock.schedule.ops",
        "penstock.cli.main",
    }


def test_schedule_names_no_torch() -> None:
    wrong = [
        f"{path.relative_to(PACKAGE)}:{getattr(node, 'lineno', 0)}: {name}"
        for path in sorted((PACKAGE / "schedule").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for name in imported_names(node, path)
        if name.split(".")[0] in {"torch", "numpy", "transformers"}
    ]
    assert not wrong, "\n".join(wrong)


def test_importing_schedule_does_not_import_torch() -> None:
    script = (
        "import sys, penstock.schedule, penstock.schedule.conformance\n"
        "print(sorted({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert found.stdout.strip() == "[]"
