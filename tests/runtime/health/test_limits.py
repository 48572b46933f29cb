"""The words by which an error of torch says that another rank is late or gone."""

from __future__ import annotations

import pytest

from penstock.runtime.health.limits import is_late


@pytest.mark.parametrize(
    "words",
    [
        "Watchdog caught collective operation timeout: WorkNCCL(OpType=RECV) ran for 1001 milliseconds",
        "store->get('0') got error: wait timeout after 1000ms, keys: /0",
        "Timed out waiting 1000ms for recv operation to complete",
    ],
)
def test_the_words_for_a_late_rank(words: str) -> None:
    assert is_late(RuntimeError(words))


def test_the_words_for_a_lost_rank() -> None:
    lost = "NCCL communicator was aborted on rank 0. WorkNCCL(OpType=RECV, Timeout(ms)=600000)"
    assert not is_late(RuntimeError(lost))
