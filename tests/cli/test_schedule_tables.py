"""The tables of `penstock schedule`."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from support.command import Command

SMALL = ("--ranks", "2", "--microbatches", "4")


@pytest.fixture
def penstock(penstock: Command) -> Command:
    return partial(penstock, "schedule")


def test_show_lists_programs(penstock: Command, tmp_path: Path) -> None:
    (tmp_path / "s.csv").write_text("0F0,3F0,0F1,(3F1;0B1)OVERLAP_F_B\n1F0,2F0\n")
    code, out, err = penstock("show", tmp_path / "s.csv", "--programs")
    assert code == 2
    assert "rank 0 | 0F0 3F0 0F1 (3F1;0B1)OVERLAP_F_B\nrank 1 | 1F0 2F0\n" in out
    assert "proven" not in out
    assert "penstock: error: schedule 's': it breaks" in err
    assert "rank 0 | 0F0 0F1 0B0" in penstock("show", "1f1b", *SMALL, "--programs").out


def test_a_long_critical_path_is_shortened(penstock: Command) -> None:
    out = penstock("simulate", "1f1b", "-r", "4", "-m", "32").out
    assert "critical path: 0F0 1F0 2F0 3F0 3B0 3F1 3B1 3F2 ... 54 more ... " in out


def test_compare_shows_all(penstock: Command) -> None:
    code, out, err = penstock("compare", *SMALL, "--memory-limit", "2", "--communication", "0.1")
    assert (code, err) == (0, "")
    assert "2 ranks, 4 microbatches, memory limit 2" in out
    lines = out.splitlines()
    assert lines[3].endswith("yes")
    assert next(line.split()[-1] for line in lines if line.startswith("gpipe ")) == "no"
    assert "gpipe: Give a memory limit of 4 or more." in lines
    assert "\n1f1b " in out
