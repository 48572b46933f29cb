"""What a resumed run says of data that is not that of its checkpoint."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.train.data.changes import changes, of_tokens
from penstock.train.data.store import StoreFacts


def facts(documents: int, tokens: int, digest: str) -> StoreFacts:
    return StoreFacts(documents, tokens, tokens, 0, 0, "", digest)


NOW = of_tokens("b", facts(2, 1200, "now"))


@pytest.mark.parametrize(
    ("before", "found"),
    [
        (of_tokens("b", facts(2, 1200, "now")), []),
        (of_tokens("moved", facts(2, 1200, "now")), []),
        (of_tokens("b", facts(2, 1100, "then")), ["b has 1,200 tokens (was 1,100)"]),
        (of_tokens("b", facts(1, 1000, "then")), ["b has 2 documents (was 1) and 1,200 tokens (was 1,000)"]),
        (
            of_tokens("b", facts(2, 1200, "then")),
            ["b has as many documents and tokens as before, and others"],
        ),
        (of_tokens("a", facts(2, 1100, "then")), ["b (was a) has 1,200 tokens (was 1,100)"]),
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
