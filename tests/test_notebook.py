"""docs/tutorial.ipynb runs from top to bottom, shows what its text says, and is stored without outputs."""

from __future__ import annotations

import ast
import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import nbformat
import pytest

NOTEBOOK = Path(__file__).resolve().parent.parent / "docs" / "tutorial.ipynb"


class Output(NamedTuple):
    printed: str
    value: Any  # of the last expression, which a notebook shows


def stored() -> Any:
    return nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]


def value_of(source: str, names: dict[str, Any]) -> Any:
    """Run a cell; the value of its last line if that is an expression."""
    *statements, last = ast.parse(source).body
    if not isinstance(last, ast.Expr):
        return exec(source, names)
    exec(compile(ast.Module(statements, []), "cell", "exec"), names)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Output]:
    """Run every cell, from top to bottom, in this process; what each one shows, by its id."""
    found: dict[str, Output] = {}
    names: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("notebook"))
        for cell in stored().cells:
            if cell.cell_type == "code":
                with redirect_stdout(StringIO()) as printed:
                    value = value_of(cell.source, names)
                found[cell.id] = Output(printed.getvalue(), value)
    return found


def test_the_notebook_is_stored_without_outputs() -> None:
    cells = [cell for cell in stored().cells if cell.cell_type == "code"]
    assert [cell.id for cell in cells if cell.outputs or cell.execution_count is not None] == []


def test_the_notebook_is_valid() -> None:
    nbformat.validate(stored())


def test_every_cell_runs_and_says_what_the_text_says(outputs: dict[str, Output]) -> None:
    assert "bubble 30.6%" in outputs["simulate"].printed
    assert "rank 3 | .  .  .  F0 B0 B0" in outputs["text"].printed
    assert "1f1b, 4 stages on 4 ranks" in outputs["model"].printed
    split, whole = re.findall(r"\d\.\d{7}", outputs["verify"].printed)
    assert float(split) == pytest.approx(float(whole), rel=1e-5)
    losses = [float(loss) for loss in re.findall(r"\d\.\d{3}", outputs["step"].printed)]
    assert len(losses) == 5
    assert losses == sorted(losses, reverse=True)
    whole, split = re.findall(r"\d\.\d{6}", outputs["save"].printed)
    assert float(split) == pytest.approx(float(whole), rel=1e-5)


@pytest.mark.sweep
def test_the_schedule_and_the_measured_step_are_drawn(outputs: dict[str, Output]) -> None:
    schedule, step = (outputs[name].value._repr_svg_() for name in ("svg", "timeline"))
    assert ">predicted" not in schedule
    assert "predicted" in step
    assert "measured" in step
