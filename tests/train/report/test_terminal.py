"""The view of a run on a terminal: its curves are right, and it fits any width."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.train.report.recorded import read_run
from penstock.train.report.terminal import ROWS, Bubbles, dots, view
from support.recorded_runs import on_terminal, row, write

NONE = Bubbles(0)


def shown(folder: Path, width: int = 100, bubbles: Bubbles = NONE) -> str:
    return on_terminal(view(read_run(folder), "running", "step 2 of 4", bubbles), width)


def test_a_line_of_dots_rises_falls_and_has_no_gap() -> None:
    assert dots({0: 0.0, 1: 1.0, 2: 2.0, 3: 3.0}, 2, 1) == ["⡠⠊"]
    assert dots({0: 7.0, 7: 0.0}, 4, 2) == ["⠑⢄⠀⠀", "⠀⠀⠑⢄"]
    assert dots({0: 0.0, 1: 7.0}, 1, 2) == ["⢸", "⡸"]  # a jump is a line
    assert dots({0: 5.0, 3: 5.0}, 2, 1) == ["⣀⣀"]  # all alike
    assert dots({0: 5.0}, 2, 1) == ["⡀⠀"]


def test_it_has_numbers_curves_and_each_rank(tmp_path: Path) -> None:
    rows = [row(step, skipped="loss=nan") if step == 2 else row(step) for step in (1, 2, 3)]
    text = shown(write(tmp_path / "mine", *rows), bubbles=Bubbles(8, (0.25, 0.5)))
    for words in ("mine  running", "step 2 of 4", "about 2 s of steps left", "Tokens a second",
                  "10,000 median", "peak host memory", "3.00 GiB", "bubble in step 8", "rank 1", "50.0%",
                  "steps skipped, for their loss or gradients: 1 (step 2)"):  # fmt: skip
        assert words in text, words
    loss = text[text.index(" loss") :]
    assert loss.index("4 ") < loss.index("2 ")  # its greatest value is above its least
    assert "⠀" in text


@pytest.mark.parametrize("width", [40, 80, 200])
def test_it_is_never_wider_than_the_terminal(tmp_path: Path, width: int) -> None:
    text = shown(write(tmp_path, row(1), row(2)), width, Bubbles(2, (0.1, 0.2)))
    assert max(map(len, text.splitlines())) == width


def test_a_run_without_a_step_is_shown_too(tmp_path: Path) -> None:
    assert "running" in shown(write(tmp_path))


def test_of_many_processes_those_with_the_most_are_shown(tmp_path: Path) -> None:
    peaks = [at << 30 for at in range(1, ROWS + 4)]
    text = shown(write(tmp_path, row(1, peak_resident=peaks)))
    assert "process 2 " not in text
    assert "process 3 " in text
    assert "least 1.00 GiB" in text
