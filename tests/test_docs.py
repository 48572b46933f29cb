"""What docs/schedules.md, docs/config.md and docs/models.md say is so."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from penstock.schedule import build, render, simulate, verify
from penstock.schedule.builders import BUILDERS
from penstock.train.config.load import load_config

_ROW = re.compile(r"rank +\d+ \|")
ROOT = Path(__file__).parent.parent


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{name}_page", ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


PAGE = _load("schedules")
CONFIG = _load("config")
FAULTS = _load("faults")
FORMULAS = PAGE.FORMULAS


def test_the_page_is_what_the_builders_say() -> None:
    assert PAGE.PAGE.read_text(encoding="utf-8") == PAGE.page(), "run: make docs"


def test_the_reference_of_the_config_is_what_the_models_say() -> None:
    assert CONFIG.PAGE.read_text(encoding="utf-8") == CONFIG.page(), "run: make docs"


def test_the_table_of_faults_is_what_was_found() -> None:
    assert FAULTS.PAGE.read_text(encoding="utf-8") == FAULTS.page(), "run: make docs"


def test_the_table_has_no_fault_that_no_test_tries() -> None:
    """And none that was not survived: the page says in words what nobody notices."""
    rows = json.loads(FAULTS.RESULTS.read_text(encoding="utf-8"))["rows"]
    source = "".join(file.read_text(encoding="utf-8") for file in sorted((ROOT / "tests").rglob("test_*.py")))
    assert [row["kind"] for row in rows if row["kind"] not in source] == []
    assert [row["where"] for row in rows if row["survived"] < row["tried"]] == []


def test_every_key_of_the_config_is_in_its_reference_with_a_meaning() -> None:
    sections = [CONFIG.SCHEMA, *CONFIG.SCHEMA["$defs"].values()]
    rows = re.findall(r"^\| `(\w+)` \| .+ \| .+ \| (.*) \|$", CONFIG.page(), re.MULTILINE)
    assert Counter(key for key, _ in rows) == Counter(key for each in sections for key in each["properties"])
    assert [key for key, means in rows if not means.strip()] == []


def test_every_key_that_takes_values_of_several_kinds_has_a_form() -> None:
    shown = {(form.place, form.line.partition(":")[0]) for form in CONFIG.FORMS}
    for table in CONFIG.tables():
        for key, value in table.schema["properties"].items():
            kinds = [each for each in value.get("anyOf", value.get("oneOf", [])) if each != {"type": "null"}]
            assert len(kinds) < 2 or (table.place, key) in shown, (table.place, key)


@pytest.mark.parametrize("form", CONFIG.FORMS, ids=lambda form: form.line)
def test_the_trainer_takes_each_form(form: Any, tmp_path: Path) -> None:
    """Below the sections that the reference calls enough; it says something else than the defaults do."""
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG.EXAMPLE)
    enough = load_config(file)
    places = form.place.split(".") if form.place else []
    lines = [f"{'  ' * depth}{key}:\n" for depth, key in enumerate(places)]
    kept = CONFIG.EXAMPLE
    for given in (form.line.partition(":")[0], form.beside.partition(":")[0]):
        kept = re.sub(rf"^{given}:\n(  .*\n)+", "", kept, flags=re.MULTILINE) if given else kept
    file.write_text("".join([kept, form.beside, "\n", *lines, "  " * len(places), form.line, "\n"]))
    assert load_config(file) != enough


@pytest.mark.sweep
def test_the_table_of_models_is_what_cutting_them_shows() -> None:
    # in a process of its own, as other tests change what transformers' functions remember
    run = (sys.executable, "-c", "import models; print(models.page(), end='')")
    paths = {"PYTHONPATH": f"{ROOT / 'docs'}{os.pathsep}{ROOT / 'tests'}"}
    page = subprocess.run(run, env={**os.environ, **paths}, capture_output=True, text=True, check=True).stdout
    assert (ROOT / "docs/models.md").read_text(encoding="utf-8") == page, "run: make docs-pages"


def test_every_builder_has_a_formula_and_a_picture() -> None:
    assert {formula.schedule for formula in FORMULAS} == BUILDERS.keys(), "write it in docs/schedules.py"
    for name in BUILDERS:
        assert (ROOT / "docs" / "pictures" / f"{name}.svg").is_file(), "run: make pictures"


@pytest.mark.parametrize("page", ["README.md", "docs/guides/schedules.md", "docs/seeds.md"])
def test_the_pages_that_count_the_families_of_schedules_count_right(page: str) -> None:
    words = {14: "fourteen", 15: "fifteen", 16: "sixteen"}
    said = re.findall(r"(\d+|\w+teen) families", (ROOT / page).read_text(encoding="utf-8"))
    assert said
    assert {each.lower() for each in said} <= {str(len(BUILDERS)), words[len(BUILDERS)]}


def _name(formula: Any) -> str:
    return "-".join([formula.schedule, *map(str, formula.options)])


@pytest.mark.parametrize("formula", FORMULAS, ids=_name)
def test_formulas(formula: Any) -> None:
    """Each at every size that it holds for; at least 15 of those tried."""
    seen = 0
    for ranks in range(1, 7):
        for microbatches in range(1, 17):
            if formula.schedule == "dualpipe" and (ranks % 2 or microbatches % 2):
                continue
            if not formula.value(formula.holds_for, P=ranks, m=microbatches):
                continue
            seen += 1
            schedule = build(formula.schedule, ranks=ranks, microbatches=microbatches, **formula.options)
            timeline = simulate(schedule)
            makespan = formula.value(formula.makespan, P=ranks, m=microbatches)
            assert timeline.makespan == makespan, (ranks, microbatches)
            assert timeline.bubble == pytest.approx(
                formula.value(formula.bubble, P=ranks, m=microbatches), abs=1e-12
            )
            for rank, live in enumerate(verify(schedule).peak_live):
                said = formula.value(formula.live, P=ranks, m=microbatches, r=rank)
                assert live <= said if formula.most else live == said, (ranks, microbatches, rank)
    assert seen >= 15


@pytest.mark.parametrize("name", BUILDERS)
def test_the_drawing_is_what_is_built(name: str) -> None:
    """Each docstring says for how many ranks and microbatches it draws."""
    doc = inspect.getdoc(BUILDERS[name]) or ""
    sizes = re.search(r"P = (\d+) ranks,\s+m = (\d+)\s+microbatches", doc)
    assert sizes is not None
    drawn = [line.strip() for line in doc.splitlines() if _ROW.match(line.strip())]
    wanted = build(name, ranks=int(sizes[1]), microbatches=int(sizes[2]))
    grid = [line.strip() for line in render(wanted).splitlines() if _ROW.match(line)]
    assert drawn == grid
