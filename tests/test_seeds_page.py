"""docs/seeds.md names files and tests that exist, and says of each row how it is held."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs" / "seeds.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| option or promise")
]


def named(cell: str, path: str) -> list[tuple[str, str]]:
    """The files of a cell, each with the test that is named in it, if any."""
    return re.findall(rf"`({path})(?:::(\w+))?`", cell)


def test_every_file_and_test_that_is_named_exists() -> None:
    for option, _, where, held in ROWS:
        for path, _ in named(where, r"\S+\.py"):
            assert (ROOT / "src" / "penstock" / path).is_file(), (option, path)
        for path, test in named(held, r"(?:tests|examples|configs)/[^`:]+"):
            file = ROOT / path
            assert file.is_file(), (option, path)
            assert not test or f"def {test}(" in file.read_text(), (option, path, test)


def test_every_row_is_held_or_says_that_it_is_missing() -> None:
    assert len(ROWS) > 60
    for option, ours, _, held in ROWS:
        assert ours, option
        assert named(held, r"(?:tests|examples|configs)/[^`:]+") or "**missing**" in ours, option
