from __future__ import annotations

import pytest

from support.jobs_checkpoint import make
from support.writing import Made


@pytest.fixture
def alone() -> Made:
    """One stage and its optimizer."""
    return make(1, "1f1b", layers=1)
