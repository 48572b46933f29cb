"""docs/tutorial.ipynb runs from top to bottom, shows what its text says, and is stored without outputs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).resolve().parent.parent / "docs" / "tutorial.ipynb"
SECONDS_A_CELL = 60


def stored() -> Any:
    return nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]


@pytest.fixture(scope="module")
def executed_notebook(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The notebook with its outputs; an error in a cell, or a cell that takes too long, fails the test."""
    notebook = stored()
    place = {"metadata": {"path": str(tmp_path_factory.mktemp("notebook"))}}
    NotebookClient(notebook, timeout=SECONDS_A_CELL, kernel_name="python3", resources=place).execute()
    return notebook


def printed(notebook: Any, name: str) -> str:
    """What the cell of that id printed."""
    (cell,) = (cell for cell in notebook.cells if cell.id == name)
    return "".join(out.text for out in cell.outputs if out.output_type == "stream" and out.name == "stdout")


def pictures(notebook: Any, name: str) -> list[str]:
    (cell,) = (cell for cell in notebook.cells if cell.id == name)
    return [out.data["image/svg+xml"] for out in cell.outputs if "image/svg+xml" in out.get("data", {})]


def test_the_notebook_is_stored_without_outputs() -> None:
    cells = [cell for cell in stored().cells if cell.cell_type == "code"]
    assert [cell.id for cell in cells if cell.outputs or cell.execution_count is not None] == []


def test_the_notebook_is_valid() -> None:
    nbformat.validate(stored())


def test_every_cell_runs_and_says_what_the_text_says(executed_notebook: Any) -> None:
    assert "bubble 30.6%" in printed(executed_notebook, "simulate")
    assert "rank 3 | .  .  .  F0 B0 B0" in printed(executed_notebook, "text")
    assert "1f1b, 4 stages on 4 ranks" in printed(executed_notebook, "model")
    split, whole = re.findall(r"\d\.\d{7}", printed(executed_notebook, "verify"))
    assert float(split) == pytest.approx(float(whole), rel=1e-5)
    losses = [float(loss) for loss in re.findall(r"\d\.\d{3}", printed(executed_notebook, "step"))]
    assert len(losses) == 5
    assert losses == sorted(losses, reverse=True)
    whole, split = re.findall(r"\d\.\d{6}", printed(executed_notebook, "save"))
    assert float(split) == pytest.approx(float(whole), rel=1e-5)


def test_the_schedule_and_the_measured_step_are_drawn(executed_notebook: Any) -> None:
    (schedule,) = pictures(executed_notebook, "svg")
    (step,) = pictures(executed_notebook, "timeline")
    assert ">predicted" not in schedule
    assert "predicted" in step
    assert "measured" in step
