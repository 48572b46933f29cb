from __future__ import annotations

from pathlib import Path

import pytest

from support.faults import attempt, rows, tree


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run to which nothing happened."""
    folder = tmp_path_factory.mktemp("undisturbed")
    ended = attempt(tree(folder))
    assert list(ended.codes.values()) == [0, 0], ended.errors
    assert list(rows(folder)) == [1, 2, 3, 4, 5, 6]
    return folder
