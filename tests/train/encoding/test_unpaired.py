"""Single completions in TRL's formats become TRL's tokens; a record without a label is refused."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest

from penstock.batch.loss import IGNORED
from penstock.errors import DataError
from penstock.train.data.sources import Record
from penstock.train.encoding.encode import Encoder
from penstock.train.encoding.tokenizer import HuggingFace
from penstock.train.encoding.unpaired import UnpairedEncoder
from support.chats import text_of
from support.refusals import refuses

USER, YES, NO = ({"role": role, "content": said} for role, said in
                 (("user", "2 + 3?"), ("assistant", "5"), ("assistant", "six")))  # fmt: skip
TEXTS = {"prompt": "2 + 3? ", "completion": "5", "label": True}
PAIR = {"prompt": "2 + 3? ", "chosen": "5", "rejected": "six"}
FORMS: dict[str, tuple[dict[str, Any], list[tuple[str, bool]]]] = {
    "texts": (TEXTS, [("5", True)]),
    "undesirable": ({**TEXTS, "label": False}, [("5", False)]),
    "messages": ({"prompt": [USER], "completion": [NO], "label": False}, [("six", False)]),
    "a pair": (PAIR, [("5", True), ("six", False)]),
    "a pair of messages": ({"chosen": [USER, YES], "rejected": [USER, NO]}, [("5", True), ("six", False)]),
}


def encoded(row: dict[str, Any], **options: Any) -> list[tuple[str, str, bool]]:
    """By document: the whole text, the text that counts, and whether it is desirable."""
    documents = UnpairedEncoder(HuggingFace("bytes"), **options).encode("a.jsonl line 1", row)
    made = []
    for document in documents:
        assert document is not None
        assert document.labels is not None
        start = int((document.labels != IGNORED).argmax())
        assert document.labels[start:].tolist() == document.ids[start:].tolist()
        made.append((text_of(document.ids.tolist()), text_of(document.labels.tolist()),
                     document.row_label == (1.0,)))  # fmt: skip
    return made


@pytest.mark.parametrize("name", FORMS)
def test_the_completion_counts_and_has_its_label(name: str) -> None:
    row, expected = FORMS[name]
    made = encoded(row)
    assert [(said.removesuffix("\n").removesuffix("<|im_end|>").strip(), desirable)
            for _, said, desirable in made] == expected  # fmt: skip
    assert all("2 + 3?" in text.removesuffix(said) for text, said, _ in made)


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed")
def test_pairs_become_the_rows_of_trl_in_its_order() -> None:
    from datasets import Dataset
    from trl.data_utils import unpair_preference_dataset

    pairs = [{"prompt": f"q{at}", "chosen": "a" * at, "rejected": "b" * at} for at in range(1, 5)]
    rows = [*unpair_preference_dataset(Dataset.from_list(pairs))]
    own = HuggingFace("bytes")
    made, expected = (
        Encoder(own, "unpaired", True, "text").encode(
            [Record(str(at), json.dumps(row).encode()) for at, row in enumerate(records)]
        )
        for records in (pairs, rows)
    )
    shown = [[repr(document) for _, document in of] for of in (made, expected)]
    assert len(shown[0]) == 8
    assert shown[0] == shown[1]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no label": ({"prompt": "a", "completion": "b"}, "it has no field 'label'"),
    "a number": ({**TEXTS, "label": 1}, "label says whether the completion is desirable, and here is 1"),
    "a word": ({**TEXTS, "label": "good"}, "and here is 'good'"),
    "no completion": ({"prompt": "a", "label": True}, "it has no field 'completion'"),
    "an empty one": ({**TEXTS, "completion": ""}, "completion is empty"),
    "no prompt": ({"completion": "b", "label": True}, "it has no field 'prompt'"),
    "half a pair": ({"prompt": "a", "chosen": "b"}, "it has no field 'rejected'"),
    "both forms": ({**PAIR, **TEXTS}, "nothing reads 'chosen', 'rejected'"),
    "a weight": ({"prompt": [USER], "completion": [{**YES, "weight": 0}], "label": True}, "has weight"),
    "more": ({**TEXTS, "score": 1}, "nothing reads 'score'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_record_that_is_no_row_is_refused(name: str) -> None:
    row, rule = REFUSED[name]
    with refuses(DataError, "data file a.jsonl line 1", rule):
        encoded(row)


def test_the_label_may_have_another_name_and_fields_can_be_ignored() -> None:
    row = {"prompt": "a ", "completion": "b", "good": False, "score": 1}
    assert encoded(row, label="good", ignored=("score",)) == encoded(
        {**TEXTS, "prompt": "a ", "completion": "b", "label": False}
    )


def test_a_completion_that_does_not_count_may_be_dropped() -> None:
    row = {"prompt": "", "completion": "b", "label": True}
    own = HuggingFace("bytes")
    own.own.eos_token = None
    assert UnpairedEncoder(own, drop=True).encode("a", row) == [None]
