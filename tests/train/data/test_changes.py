"""What a resumed run says of data that is not that of its checkpoint."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.train.data.changes import Known, changes


def known(path: str, documents: int, tokens: int, digest: str) -> Known:
    return {"path": path, "digest": digest, "documents": documents, "tokens": tokens}


NOW = known("b", 2, 1200, "now")


@pytest.mark.parametrize(
    ("before", "found"),
    [
        (known("b", 2, 1200, "now"), []),
        (known("moved", 2, 1200, "now"), []),
        (known("b", 2, 1100, "then"), ["b has 1,200 tokens (was 1,100)"]),
        (known("b", 1, 1000, "then"), ["b has 2 documents (was 1) and 1,200 tokens (was 1,000)"]),
        (
            known("b", 2, 1200, "then"),
            ["b has as many documents and tokens as before, and others"],
        ),
        (known("a", 2, 1100, "then"), ["b (was a) has 1,200 tokens (was 1,100)"]),
        ({"digest": 7}, ["b (was None) has as many documents and tokens as before, and others"]),
    ],
)
def test_a_changed_source_is_named_with_its_counts(before: dict[str, Any], found: list[str]) -> None:
    assert changes([before], [NOW]) == found


def test_a_number_of_sources_that_changed_is_said() -> None:
    assert changes([NOW, NOW], [NOW]) == ["it has 1 source (was 2)"]


@pytest.mark.parametrize("written", [None, 3, [1], {"a": 1}])
def test_what_another_version_wrote_says_nothing(written: object) -> None:
    assert changes(written, [NOW]) == []
