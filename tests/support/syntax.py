"""The package's files and their syntax trees: parsed once for all tests that read the source."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

import penstock

PACKAGE = Path(penstock.__file__).parent
# a worker of xdist parses the source for itself: one does for all of these tests
IN_ONE_WORKER = pytest.mark.xdist_group("syntax")


@cache
def modules() -> dict[str, Path]:
    """Every file of the package by its dotted name."""
    paths = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ("penstock", *path.relative_to(PACKAGE).with_suffix("").parts)
        paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return paths


@cache
def trees() -> dict[str, ast.Module]:
    """The source by module. Nobody may change a tree."""
    return {name: ast.parse(path.read_text("utf-8")) for name, path in modules().items()}
