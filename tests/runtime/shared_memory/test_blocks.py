"""Blocks of shared memory: their capacity, and what a free one keeps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.runtime.shared_memory.blocks import PAGE, Blocks, free_block, rounded
from penstock.runtime.shared_memory.segment import Segment
from runtime.shared_memory.test_segment import segment


@pytest.mark.parametrize("nbytes", [0, 1, PAGE, PAGE + 1, 100_000, 10**7 + 3, 2**30 + 1])
def test_a_capacity_is_whole_pages_and_an_eighth_more_at_most(nbytes: int) -> None:
    assert rounded(nbytes) % PAGE == 0
    assert nbytes <= rounded(nbytes) <= max(nbytes * 1.125, nbytes + PAGE)


@pytest.fixture
def own() -> Iterator[Segment]:
    made = segment()
    yield made
    made.close()


def test_a_block_is_taken_again_once_its_receiver_has_freed_it(own: Segment) -> None:
    blocks = Blocks(own)
    first = blocks.take(100)
    assert blocks.take(100) is not first  # it is held
    free_block(own, first.index)
    assert blocks.take(100) is first
    assert blocks.nbytes == 200


def test_memory_that_a_step_did_not_use_is_returned(own: Segment) -> None:
    blocks = Blocks(own)
    block = blocks.take(PAGE)
    free_block(own, block.index)
    blocks.trim()
    assert blocks.nbytes == PAGE  # the last step used it
    blocks.trim()
    assert blocks.nbytes == 0


def test_a_segment_without_room_says_so(own: Segment) -> None:
    with pytest.raises(RuntimeError, match=r"no room for \d+ bytes in a shared segment"):
        Blocks(own).take(own.nbytes)
