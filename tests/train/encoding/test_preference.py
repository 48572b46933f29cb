"""Preferences in TRL's formats become TRL's tokens; a record that is no pair is refused."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from penstock.batch.loss import IGNORED
from penstock.errors import DataError
from penstock.train.encoding.preference import PreferenceEncoder
from penstock.train.encoding.tokenizer import HuggingFace
from support.chats import text_of
from support.refusals import refuses

USER, YES, NO = ({"role": role, "content": said} for role, said in
                 (("user", "2 + 3?"), ("assistant", "5"), ("assistant", "six")))  # fmt: skip
FORMS: dict[str, dict[str, Any]] = {
    "texts": {"prompt": "2 + 3? ", "chosen": "5", "rejected": "six"},
    "texts that begin alike": {"chosen": "2 + 3? 5", "rejected": "2 + 3? six"},
    "messages": {"prompt": [USER], "chosen": [YES], "rejected": [NO]},
    "messages that begin alike": {"chosen": [USER, YES], "rejected": [USER, NO]},
    "a prompt twice": {"prompt": "2 + 3?", "chosen": [USER, YES], "rejected": [USER, NO]},
    "one begins the other": {"chosen": "abc", "rejected": "abcd"},
}


def encoded(row: dict[str, Any], **options: Any) -> list[tuple[list[int], list[int]]]:
    pair = PreferenceEncoder(HuggingFace("bytes"), **options).encode("a.jsonl line 1", row)
    assert pair is not None
    return [(half.ids.tolist(), [] if half.labels is None else half.labels.tolist()) for half in pair]


@pytest.mark.parametrize("name", FORMS)
def test_the_completion_counts_and_the_prompt_does_not(name: str) -> None:
    (ids, labels), (other, rejected) = encoded(FORMS[name])
    start = next(at for at, label in enumerate(labels) if label != IGNORED)
    assert labels == [IGNORED] * start + ids[start:]
    assert rejected == [IGNORED] * start + other[start:]
    assert ids[:start] == other[:start]
    said = ("c", "cd") if name == "one begins the other" else ("5", "six")
    assert [
        text_of(of).removesuffix("\n").removesuffix("<|im_end|>").strip() for of in (labels, rejected)
    ] == [*said]


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed")
@pytest.mark.parametrize(
    "name", ["texts that begin alike", "messages that begin alike", "one begins the other"]
)
def test_the_prompt_is_that_of_trl(name: str) -> None:
    from trl.data_utils import extract_prompt

    assert encoded(FORMS[name]) == encoded(extract_prompt(FORMS[name]))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no other half": ({"prompt": "a", "chosen": "b"}, "it has no field 'rejected'"),
    "empty": ({"prompt": "a", "chosen": "", "rejected": "c"}, "chosen is empty"),
    "no messages": ({"prompt": [USER], "chosen": [YES], "rejected": []}, "rejected is empty"),
    "two prompts": ({"chosen": "a b", "rejected": "c d"}, "no prompt in common"),
    "two chats": ({"chosen": [USER, YES], "rejected": [{**USER, "content": "?"}, NO]}, "no prompt in common"),
    "two forms": ({"prompt": "a", "chosen": "b", "rejected": [NO]}, "the other a list of messages"),
    "a number": ({"prompt": "a", "chosen": 5, "rejected": "c"}, "chosen is a int"),
    "a weight": ({"prompt": [USER], "chosen": [{**YES, "weight": 0}], "rejected": [NO]}, "has weight"),
    "more": ({"prompt": "a", "chosen": "b", "rejected": "c", "score": 1}, "nothing reads 'score'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_record_that_is_no_pair_is_refused(name: str) -> None:
    row, rule = REFUSED[name]
    with refuses(DataError, "data file a.jsonl line 1", rule):
        encoded(row)


def test_fields_can_be_ignored_and_messages_need_a_template() -> None:
    row = {"prompt": "a ", "chosen": "b", "rejected": "c", "score": 1}
    assert encoded(row, ignored=("score",)) == encoded(
        {key: row[key] for key in ("prompt", "chosen", "rejected")}
    )
    plain = HuggingFace("bytes")
    plain.own.chat_template = None
    made = PreferenceEncoder(plain)
    assert made.encode("a", FORMS["texts"]) is not None
    with refuses(DataError, "data file a", "no chat template"):
        made.encode("a", FORMS["messages"])
