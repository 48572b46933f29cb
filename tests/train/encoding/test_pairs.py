"""Two texts that belong together become two documents; a record without them is refused."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.errors import DataError
from penstock.train.encoding.pairs import PairEncoder
from penstock.train.encoding.tokenizer import ByteTokenizer
from support.refusals import refuses


def encoded(row: dict[str, Any], fields: Any = None, **options: Any) -> list[bytes] | None:
    made = PairEncoder(ByteTokenizer(), fields, 8, **options).encode("a.jsonl line 1", row)
    return None if made is None else [bytes(half.ids.tolist()) for half in made]


@pytest.mark.parametrize("names", [
    ("anchor", "positive"), ("query", "positive"), ("question", "answer"), ("query", "document"),
    ("sentence1", "sentence2"), ("query", "answer"),
])  # fmt: skip
def test_anchor_and_positive_are_known_by_their_names(names: tuple[str, str]) -> None:
    assert encoded({names[1]: "p", names[0]: "a", "more": None}) == [b"a", b"p"]


def test_other_names_are_given_and_other_fields_ignored() -> None:
    assert encoded({"a": "1", "b": "2", "id": 3}, ("b", "a"), ignored=("id",)) == [b"2", b"1"]


def test_a_long_text_is_cut_or_its_pair_dropped() -> None:
    row = {"anchor": "a", "positive": "abcdefghij"}
    assert encoded(row) == [b"a", b"abcdefgh"]
    assert encoded(row, drop=True) is None


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"anchor": "a"}, "it has the fields 'anchor', and no pair of anchor and positive"),
        ({"anchor": "a", "positive": 3}, "positive is a text, and here is a int"),
        ({"anchor": " ", "positive": "b"}, "anchor is a text, and here is a blank one"),
        ({"anchor": "a", "positive": "b", "negative": "c"}, "nothing reads 'negative' of the record"),
        ({"anchor": "a", "positive": "\ud800"}, "half of a surrogate pair"),
    ],
)
def test_a_record_that_is_no_pair_is_refused(row: dict[str, Any], said: str) -> None:
    with refuses(DataError, "data file a.jsonl line 1", said):
        encoded(row)


def test_a_field_that_is_named_and_missing_is_refused() -> None:
    with refuses(DataError, "data file a.jsonl line 1", "it has no field 'b'", "data.pair_fields"):
        encoded({"a": "1"}, ("a", "b"))
