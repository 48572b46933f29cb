"""docs/architecture.md and its picture are true of the code, and docs/api.txt of the public API."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import penstock

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"


def script(name: str, *arguments: str) -> str:
    """What docs/`name`.py prints; fails with it where the script exits with an error."""
    ran = subprocess.run(
        [sys.executable, str(ROOT / "docs" / f"{name}.py"), *arguments],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_the_picture_is_the_codes() -> None:
    script("architecture", "--check")


def test_the_counts_of_the_page_are_the_codes() -> None:
    script("counts", "--check-source")


@pytest.mark.sweep
def test_the_counts_of_a_build_and_a_step_are_the_codes() -> None:
    script("counts", "--check")


def test_the_page_of_the_public_api_is_the_codes() -> None:
    """In this process, which has imported what the page describes."""
    assert not runpy.run_path(str(ROOT / "docs" / "api.py"))["stale"](), "run python docs/api.py"


# _HOMES is the table itself
def test_each_public_name_is_looked_up_in_the_file_that_defines_it() -> None:
    for name, home in penstock._HOMES.items():
        assert getattr(penstock, name).__module__ == home


def paths() -> list[str]:
    """Every path in the page that looks like a file or a folder of the source or the tests."""
    found = re.findall(r"`([a-z_/]+(?:\.py|/)?)`", PAGE.read_text(encoding="utf-8"))
    return sorted({path for path in found if "/" in path or path.endswith(".py")})


@pytest.mark.parametrize("path", paths())
def test_every_path_of_the_page_exists(path: str) -> None:
    assert (ROOT / "src" / "penstock" / path).exists() or (ROOT / path).exists()


def homes() -> list[tuple[str, str]]:
    """Every name of the page that is said to be in a file, with the file."""
    pattern = r"`([A-Za-z_]+)`(?:, in a new file,)? (?:in|of) `([a-z_/]+\.py)`"
    return re.findall(pattern, PAGE.read_text(encoding="utf-8"))


def test_every_name_is_in_the_file_that_the_page_says() -> None:
    def text(path: str) -> str:
        home = ROOT / "src" / "penstock" / path
        return (home if home.exists() else ROOT / path).read_text(encoding="utf-8")

    def defined(name: str, path: str) -> bool:
        return bool(re.search(rf"^\s*(?:class|def) {name}\b|^\s*{name}(?::.*)? = ", text(path), re.M))

    assert len(homes()) > 20
    assert [home for home in homes() if not defined(*home)] == []


def trips() -> list[tuple[str, list[str]]]:
    """Each trip of the page: its heading, and the files of its numbered list."""
    text = PAGE.read_text(encoding="utf-8")
    sections = re.findall(r"^## (A [a-z ]+)\n(.*?)(?=^## )", text, re.M | re.S)
    return [(name.lower(), re.findall(r"^\d\. `([a-z_/]+)\.py`", body, re.M)) for name, body in sections]


def test_the_trips_of_the_page_are_those_of_the_picture() -> None:
    source = (ROOT / "docs" / "architecture.py").read_text(encoding="utf-8")
    listing = source[source.index("TRIPS:") : source.index("class Folder")]
    drawn = {
        name: re.findall(r'"([a-z_/]+)"', files)
        for name, files in re.findall(r'"(a [a-z ]+)": \((.*?)\n    \)', listing, re.S)
    }
    assert dict(trips()) == drawn


def rows() -> dict[str, str]:
    """The table of the layers: what stands behind each name."""
    return dict(re.findall(r"^\| `([a-z_]+)(?:\.py)?` \|(.*)", PAGE.read_text(encoding="utf-8"), re.M))


def test_every_layer_has_its_row_in_the_page() -> None:
    from test_layers import LAYERS

    assert list(rows()) == list(LAYERS)


def test_each_row_names_the_folders_of_its_layer() -> None:
    for layer, row in rows().items():
        folders = [path.parent.name for path in (ROOT / "src" / "penstock" / layer).glob("*/__init__.py")]
        assert [name for name in folders if f"`{name}`" not in row] == [], layer
