"""From a record of a preference to two documents: the prompt with the chosen completion, and with the other.

    {"prompt": "2 + 3? ", "chosen": "5", "rejected": "6"}      texts: no template, the end token after both
    {"prompt": [user], "chosen": [assistant], "rejected": [assistant]}                             messages
    {"chosen": [user, assistant], "rejected": [user, assistant]}   the prompt is what both begin with

The formats are TRL's, and so are the tokens. Each half is read as a prompt with its completion (record.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from operator import eq
from typing import Any

import numpy as np

from penstock.batch.loss import IGNORED
from penstock.train.data.sources import RecordError, blaming
from penstock.train.encoding.chat import ChatEncoder, Encoded
from penstock.train.encoding.record import field_of
from penstock.train.encoding.tokenizer import HuggingFace

HALVES = ("chosen", "rejected")
_PAIR = "A preference has chosen and rejected, two texts or two lists of messages; mend the record"


class PreferenceEncoder:
    """Makes tokens of preferences.

    Args:
        drop: whether pairs with a half without a token that counts are left out
        ignored: data.ignored_fields
    """

    def __init__(self, tokenizer: HuggingFace, drop: bool = False, ignored: tuple[str, ...] = ()) -> None:
        self._tokenizer, self._ignored = tokenizer, ignored
        self._chats = ChatEncoder(tokenizer, drop=drop, texts=True, form="prompt", ignored=ignored)

    def encode(self, name: str, row: Mapping[str, Any]) -> tuple[Encoded, Encoded] | None:
        """The chosen document and the rejected one; None for a pair that is dropped.

        Raises DataError that names the record, and what is wrong with it.
        """
        with blaming(f"data file {name}"):
            halves = self.halves(row)
        chosen, rejected = (
            self._chats.encode(f"{name}, {half}", fields) for half, fields in zip(HALVES, halves, strict=True)
        )
        return None if chosen is None or rejected is None else _aligned(chosen, rejected)

    def halves(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The record as two records of a prompt with a completion, the chosen one first.

        Raises RecordError for one that is no pair.
        """
        row = {key: value for key, value in row.items() if value is not None and key not in self._ignored}
        chosen, rejected = (self.completion(half, field_of(row, half, _PAIR)) for half in HALVES)
        prompt = row.get("prompt")
        if type(chosen) is not type(rejected):
            raise RecordError("one of chosen and rejected is a text, and the other a list of messages", _PAIR)
        if type(prompt) is not type(chosen):  # as in TRL: it is in both halves
            prompt, chosen, rejected = _split(chosen, rejected)
        others = {key: value for key, value in row.items() if key not in (*HALVES, "prompt")}
        return [{**others, "prompt": prompt, "completion": half} for half in (chosen, rejected)]

    def completion(self, field: str, value: Any, mend: str = _PAIR) -> Any:
        """The value, a whole completion. Raises RecordError. mend: what the record is to be"""
        if not isinstance(value, str | list):
            raise RecordError(f"{field} is a {type(value).__name__}", mend)
        if not value:
            raise RecordError(f"{field} is empty", "Give it a completion, or leave the record out")
        if isinstance(value, str):
            return value
        if not self._tokenizer.has_template:
            rule = f"{field} is a list of messages, and the tokenizer has no chat template"
            raise RecordError(rule, "Give one, a Jinja file: data.chat_template=template.jinja")
        weighed = {"weight", "train"} & {
            key for message in value if isinstance(message, dict) for key in message
        }
        if weighed:
            rule = f"a message of {field} has {weighed.pop()}, and the loss compares whole completions"
            raise RecordError(rule, "Remove it")
        return value


def _split(chosen: Any, rejected: Any) -> tuple[Any, Any, Any]:
    """The prompt that both begin with, and the rest of each: some of the shorter one remains, as in TRL."""
    common = sum(1 for _ in takewhile(bool, map(eq, chosen, rejected)))
    common = min(common, len(chosen) - 1, len(rejected) - 1)
    if isinstance(chosen, str) and chosen[common - 1 : common] == " ":  # it belongs to the completion
        common -= 1
    if not common:
        rule = "chosen and rejected begin differently, so that they have no prompt in common"
        raise RecordError(rule, "Give a prompt, or mend the record: both answer the same one")
    return chosen[:common], chosen[common:], rejected[common:]


def _aligned(chosen: Encoded, rejected: Encoded) -> tuple[Encoded, Encoded]:
    """Both halves count from the same token on: tokens may merge over the prompt's end in one of them."""
    starts = [int(np.flatnonzero(_labels(half) != IGNORED)[0]) for half in (chosen, rejected)]
    first, second = (
        _from(half, start, min(starts)) for half, start in zip((chosen, rejected), starts, strict=True)
    )
    return first, second


def _from(half: Encoded, start: int, first: int) -> Encoded:
    labels = _labels(half).copy()
    labels[first:start] = half.ids[first:start]
    return half._replace(labels=labels)


def _labels(half: Encoded) -> Any:
    assert half.labels is not None
    return half.labels
