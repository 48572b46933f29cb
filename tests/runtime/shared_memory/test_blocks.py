"""Blocks of shared memory: their capacity, and what a free one keeps."""

from __future__ import annotations

import pytest

from penstock.runtime.shared_memory.blocks import PAGE, rounded


@pytest.mark.parametrize("nbytes", [0, 1, PAGE, PAGE + 1, 100_000, 10**7 + 3, 2**30 + 1])
def test_a_capacity_is_whole_pages_and_an_eighth_more_at_most(nbytes: int) -> None:
    assert rounded(nbytes) % PAGE == 0
    assert nbytes <= rounded(nbytes) <= max(nbytes * 1.125, nbytes + PAGE)
