"""What docs/schedules.md and docs/models.md say is so."""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from penstock.schedule import build, render, simulate, verify
from penstock.schedule.builders import BUILDERS

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
FORMULAS = PAGE.FORMULAS


def test_the_page_is_what_the_builders_say() -> None:
    assert PAGE.PAGE.read_text(encoding="utf-8") == PAGE.page(), "run: make docs"


@pytest.mark.sweep
def test_the_table_of_models_is_what_cutting_them_shows() -> None:
    models = _load("models")
    assert models.PAGE.read_text(encoding="utf-8") == models.page(), "run: make docs"


def test_every_builder_has_a_formula_and_a_picture() -> None:
    assert {formula.schedule for formula in FORMULAS} == BUILDERS.keys()
    for name in BUILDERS:
        assert (ROOT / "docs" / "pictures" / f"{name}.svg").is_file()


def _name(formula: Any) -> str:
    return "-".join([formula.schedule, *map(str, formula.options)])


@pytest.mark.parametrize("formula", FORMULAS, ids=_name)
def test_formulas(formula: Any) -> None:
    """Each at every size that it holds for; at least 15 of those tried."""
    seen = 0
    for ranks in range(1, 8):
        for microbatches in range(1, 23):
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
    doc = inspect.getdoc(sys.modules[BUILDERS[name].__module__]) or ""
    sizes = re.search(r"P = (\d+) ranks,\s+m = (\d+)\s+microbatches", doc)
    assert sizes is not None
    drawn = [line.strip() for line in doc.splitlines() if _ROW.match(line.strip())]
    wanted = build(name, ranks=int(sizes[1]), microbatches=int(sizes[2]))
    grid = [line.strip() for line in render(wanted).splitlines() if _ROW.match(line)]
    assert drawn == grid
