"""The house: imports run downwards only, types included; no cycle between files; schedules need no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from support.syntax import IN_ONE_WORKER, PACKAGE, modules, trees

pytestmark = IN_ONE_WORKER

# from the top down: a layer imports itself and what stands below it
LAYERS = (
    "cli",
    "train",
    "integrations",
    "launch",
    "checkpoint",
    "planner",
    "pipeline",
    "parallel",
    "models",
    "runtime",
    "batch",
    "options",
    "findings",
    "schedule",
    "yaml_reader",
    "reading",
    "private",
    "shortages",
    "errors",
)
UNRELATED = {("parallel", "models")}  # though one stands higher
UNRELATED |= {("cli", "integrations"), ("train", "integrations")}
UNRELATED |= {("launch", layer) for layer in LAYERS if layer not in ("launch", "shortages", "errors")}
DEPTH = {name: depth for depth, name in enumerate(LAYERS)}


def layer_of(module: str) -> str:
    """``penstock.runtime.plan`` -> ``runtime``; the front door and ``python -m penstock`` are of the cli."""
    top = module.split(".")[1] if "." in module else "__main__"
    return "cli" if top == "__main__" else top


def imported(tree: ast.AST, known: Mapping[str, Path]) -> Iterator[tuple[str, int]]:
    """The files of the package that a syntax tree imports, for whatever reason, with the lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"a relative import in line {node.lineno}: name the package"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            while name and name not in known:
                name = name.rpartition(".")[0]
            if name:
                yield name, node.lineno


def graph() -> dict[str, list[tuple[str, int]]]:
    known = modules()
    return {name: list(imported(tree, known)) for name, tree in trees().items()}


def allowed(importer: str, target: str) -> bool:
    if importer == "penstock" or importer.startswith("penstock.__main__"):
        return True
    if target == "penstock":  # for its version
        return layer_of(importer) == "cli"
    high, low = layer_of(importer), layer_of(target)
    return high == low or (DEPTH[high] < DEPTH[low] and (high, low) not in UNRELATED)


def test_every_file_has_its_layer() -> None:
    """A new folder is entered above; nothing but the front doors and the errors lies loose at the top."""
    tops = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in modules().values()}
    assert tops == {*LAYERS, "__init__", "__main__"}


def test_folders_go_two_levels_deep_at_most() -> None:
    assert max(len(path.relative_to(PACKAGE).parts) for path in modules().values()) <= 3


def test_imports_run_downwards_only() -> None:
    wrong = [
        f"{importer}:{line} imports {target}"
        for importer, targets in graph().items()
        for target, line in targets
        if not allowed(importer, target)
    ]
    assert not wrong, "\n".join(wrong)


def cycle_in(edges: Mapping[str, set[str]]) -> list[str]:
    """Some cycle, as the files along it; empty where there is none."""
    done: set[str] = set()

    def visit(name: str, trail: list[str]) -> list[str]:
        if name in trail:
            return trail[trail.index(name) :]
        if name in done:
            return []
        for target in sorted(edges.get(name, ())):
            if found := visit(target, [*trail, name]):
                return found
        done.add(name)
        return []

    return next((found for name in edges if (found := visit(name, []))), [])


def test_no_cycle_between_files() -> None:
    edges = {name: {target for target, _ in targets if target != name} for name, targets in graph().items()}
    edges["penstock"] = set()  # the front door names everything, and only the cli asks it for the version
    assert not cycle_in(edges), " -> ".join(cycle_in(edges))


def test_cycles_are_found() -> None:
    assert cycle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]
    assert cycle_in({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


@pytest.mark.parametrize(
    ("importer", "target", "fine"),
    [
        ("penstock.cli.main", "penstock.train.loop", True),
        ("penstock.runtime.plan", "penstock.schedule.ops", True),
        ("penstock.schedule.ops", "penstock.runtime.plan", False),
        ("penstock.models.source", "penstock.parallel.mesh", False),
        ("penstock.parallel.mesh", "penstock.models.source", False),
        ("penstock.train.loop", "penstock.cli.main", False),
        ("penstock.errors", "penstock.schedule.ops", False),
        ("penstock.batch.loss", "penstock.runtime.stage", False),
        ("penstock.launch.start", "penstock.runtime.stage", False),
        ("penstock.launch.start", "penstock.private", False),
        ("penstock.pipeline.steps.step", "penstock.pipeline.options", True),
        ("penstock.train.loop", "penstock", False),
        ("penstock", "penstock.pipeline.pipeline", True),
    ],
)
def test_the_rule_itself(importer: str, target: str, fine: bool) -> None:
    assert allowed(importer, target) == fine


def test_every_form_of_import_is_seen() -> None:
    source = (
        "import penstock.train\n"
        "from penstock import runtime, AutoPipeline\n"
        "from penstock.schedule.ops import Op\n"
        "if TYPE_CHECKING:\n"
        "    from penstock.batch import loss\n"
        "def late():\n"
        "    from penstock.cli import main\n"
        "import os, penstockpile\n"
    )
    assert {name for name, _ in imported(ast.parse(source), modules())} == {
        "penstock.train",
        "penstock.runtime",
        "penstock",
        "penstock.schedule.ops",
        "penstock.batch.loss",
        "penstock.cli.main",
    }


def test_schedule_names_no_torch() -> None:
    wrong = [
        f"{name}:{node.lineno}"
        for name, tree in trees().items()
        if name.startswith("penstock.schedule")
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        and {n.split(".")[0] for n in [getattr(node, "module", None) or "", *(a.name for a in node.names)]}
        & {"torch", "transformers"}
    ]
    assert not wrong, "\n".join(wrong)


def test_importing_schedule_does_not_import_torch() -> None:
    """Nor numpy, which is imported when the first schedule is verified."""
    script = (
        "import sys, penstock.schedule, penstock.schedule.builders.conformance\n"
        "print(sorted({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert found.stdout.strip() == "[]"


def test_nothing_waits_for_all_streams_of_a_gpu() -> None:
    """0.5.0: a step and `layer_costs` did, and so for receives that were posted and messages under way."""
    found = [
        f"{name}:{node.lineno}"
        for name, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr == "synchronize"
        and ast.unparse(node.value) in ("torch.cuda", "torch.accelerator", "cuda")
    ]
    assert found == []


def test_every_folder_is_a_package_that_tools_look_into() -> None:
    """A folder `build` was in nobody's lint, and its tests in nobody's run: tools leave such names out."""
    left_out = {"build", "dist", "venv", "node_modules", "site"}
    for top in (PACKAGE, Path(__file__).parent):
        folders = {path.parent for path in top.rglob("*.py")}
        assert not [folder for folder in folders if left_out & set(folder.relative_to(top).parts)]
    assert not [path.parent for path in modules().values() if not (path.parent / "__init__.py").is_file()]
