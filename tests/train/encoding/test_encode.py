"""Rows of tokens and of texts are kept exactly, or refused with their line."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from penstock.errors import DataError
from penstock.train.data.sources import Record
from penstock.train.encoding.encode import Encoder, tokens_of
from penstock.train.encoding.tokenizer import HuggingFace
from support.chats import CHATML_TOOLS, outcome
from support.mutations import CASES, ODD_VALUES, mutated_json, seeded

NAME = "a.jsonl line 1"


def refused(row: dict[str, Any], ignored: tuple[str, ...] = ()) -> str:
    with pytest.raises(DataError) as caught:
        tokens_of(NAME, row, ignored)
    assert caught.value.value == f"data file {NAME}"
    return f"{caught.value.rule}. {caught.value.remedy}"


@pytest.mark.parametrize("ids", [[1.5, 2], [1, 2.0], [1, True], ["1", 2], [1, None], [2**63], 5, {"a": 1}])
def test_ids_are_whole_numbers(ids: object) -> None:
    """0.5.0: 1.5 was taken for 1, and true and "1" too: numpy rounds what it is asked to make whole."""
    assert refused({"input_ids": ids}).startswith("input_ids is a list of whole numbers")
    assert refused({"input_ids": [1, 2], "labels": ids}).startswith("labels is a list of whole numbers")


def test_ids_and_labels_fit_their_type() -> None:
    """0.5.0: a label of 2**31 or more became a negative one, and -100 of 2**32 - 100: it was not trained."""
    for large in (2**31, 2**32 - 100, 2**62):
        assert f"here is {large}" in refused({"input_ids": [1, large]})
        assert f"here is {large}" in refused({"input_ids": [1, 2], "labels": [1, large]})


def test_a_mask_is_not_passed_over() -> None:
    """0.5.0: TRL's completion_mask and assistant_masks were, and every token was trained."""
    row = {"input_ids": [1, 2, 3]}
    for field in ("completion_mask", "assistant_masks", "attention_mask", "position_ids"):
        said = refused({**row, field: [0, 1, 1], "id": 7}, ("url",))
        assert f"nothing reads {', '.join(map(repr, sorted([field, 'id'])))} of the record" in said
        assert said.endswith(f"data.ignored_fields: {json.dumps(['url', *sorted([field, 'id'])])}")
        assert tokens_of(NAME, {**row, field: [0, 1, 1]}, (field,)).ids.tolist() == [1, 2, 3]
        assert tokens_of(NAME, {**row, field: None}).ids.tolist() == [1, 2, 3]
    assert tokens_of(NAME, {**row, "attention_mask": [1, 1, 1]}).ids.tolist() == [1, 2, 3]


def drawn_row(choices: random.Random) -> Any:
    count = choices.randint(0, 5)
    row: dict[str, Any] = {"input_ids": [choices.randrange(300) for _ in range(count)]}
    if choices.random() < 0.5:
        row["labels"] = [choices.choice((-100, token)) for token in row["input_ids"]]
    if choices.random() < 0.2:
        row["attention_mask"] = [1] * count
    return mutated_json(choices, row) if choices.random() < 0.7 else row


@pytest.mark.parametrize("numbers", CASES)
def test_a_random_row_of_tokens_is_kept_or_refused(numbers: range) -> None:
    taken = 0
    for number in numbers:
        with seeded(number) as choices:
            row = drawn_row(choices)
            if not isinstance(row, dict):
                continue
            found = outcome(lambda: tokens_of(NAME, row))  # noqa: B023
            if isinstance(found, DataError):
                continue
            taken += 1
            labels = row.get("labels")
            assert found.ids.tolist() == row["input_ids"]
            assert found.labels.tolist() == (row["input_ids"] if labels is None else labels)
            assert all(type(token) is int for token in row["input_ids"])
            assert set(row) - {"input_ids", "labels"} <= {"attention_mask"} | {
                key for key, value in row.items() if value is None
            }
    assert taken > len(numbers) // 3


@pytest.mark.parametrize("numbers", CASES)
def test_a_random_row_of_text_is_kept_or_refused(numbers: range) -> None:
    """The ids of its text field, as the tokenizer itself gives them."""
    made = Encoder(HuggingFace("bytes"), "text", lines=True, text_field="text")
    taken = 0
    for number in numbers:
        with seeded(number) as choices:
            text = choices.choice(("a", "ä 😀", "\n", "x" * 50, choices.choice(ODD_VALUES)))
            row = (
                mutated_json(choices, {"text": text, "id": number})
                if choices.random() < 0.5
                else {"text": text}
            )
            if not isinstance(row, dict):
                continue
            found = outcome(lambda: made.encode([Record(NAME, row)]))  # noqa: B023
            if isinstance(found, DataError):
                assert not isinstance(row.get("text"), str) or "\ud800" in row["text"]
                continue
            ((_, encoded),) = found
            assert np.array_equal(encoded.ids, np.frombuffer(row["text"].encode(), np.uint8))
            taken += 1
    assert taken > len(numbers) // 3


def test_a_row_of_a_table_is_the_chat_without_what_other_rows_have() -> None:
    """Unreleased: a table fills fields that a row lacks with None at any depth, and the template wrote them:
    calls of tools were trained with null for the arguments of other tools.
    """
    call = {"name": "search", "arguments": {"query": "penstock"}}
    row = {
        "messages": [
            {"role": "user", "content": "Find it"},
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
        ],
        "tools": [{"type": "function", "function": {"name": "search", "parameters": {"properties": {}}}}],
    }
    filled = json.loads(json.dumps(row))
    filled["messages"][1]["tool_calls"][0]["function"]["arguments"] |= {"city": None, "days": None}
    filled["tools"][0]["function"] |= {"description": None}
    filled["tools"][0]["function"]["parameters"]["properties"] |= {"city": None}
    tokenizer = HuggingFace("bytes", CHATML_TOOLS)
    table, lines = (
        Encoder(tokenizer, "chat", of_json, "text", (("loss_on", "assistant"),)) for of_json in (False, True)
    )
    plain, of_table = (table.encode([Record(NAME, content)])[0][1] for content in (row, filled))
    of_list, of_line = (
        lines.encode([Record(NAME, content)])[0][1] for content in (filled, json.dumps(filled).encode())
    )
    assert plain is not None
    assert of_table is not None
    assert of_line is not None
    assert of_list is not None
    assert of_table.ids.tolist() == plain.ids.tolist()
    assert len(of_line.ids) > len(plain.ids)  # in JSON a null is the user's word
    assert of_list.ids.tolist() == of_line.ids.tolist()  # a file of one JSON list lost its nulls once
