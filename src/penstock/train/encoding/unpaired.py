"""From a record of one completion, desirable or not, to a document with a label.

    {"prompt": "2 + 3? ", "completion": "5", "label": true}        texts, or messages: TRL's unpaired format
    {"prompt": "2 + 3? ", "chosen": "5", "rejected": "six"}        a pair: two documents, true and false

The tokens are TRL's: as of a chat of a prompt with its completion (chat.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.train.data.sources import MEND, RecordError, blaming
from penstock.train.encoding.chat import ChatEncoder, Encoded
from penstock.train.encoding.preference import HALVES, PreferenceEncoder
from penstock.train.encoding.record import field_of
from penstock.train.encoding.tokenizer import HuggingFace

_ROW = "A row has prompt and completion, two texts or two lists of messages, and label; mend the record"


class UnpairedEncoder:
    """Makes tokens of completions.

    Args:
        label: the field that says whether a completion is desirable
        drop: whether completions without a token that counts are left out
        ignored: data.ignored_fields
    """

    def __init__(
        self,
        tokenizer: HuggingFace,
        label: str = "label",
        drop: bool = False,
        ignored: tuple[str, ...] = (),
    ) -> None:
        self._label = label
        self._pairs = PreferenceEncoder(tokenizer, drop, ignored)
        self._chats = ChatEncoder(tokenizer, drop=drop, texts=True, form="prompt", ignored=ignored)

    def encode(self, name: str, row: Mapping[str, Any]) -> list[Encoded | None]:
        """The documents of a record, with row_label 1 or 0; None for one that is dropped.

        Raises DataError that names the record, and what is wrong with it.
        """
        with blaming(f"data file {name}"):
            if "completion" in row or not row.keys() & {*HALVES}:
                return [self._document(name, *self._labelled(row))]
            chosen, rejected = self._pairs.halves(row)
        return [self._document(f"{name}, {half}", fields, half == HALVES[0])
                for half, fields in zip(HALVES, (chosen, rejected), strict=True)]  # fmt: skip

    def _document(self, name: str, fields: Mapping[str, Any], desirable: bool) -> Encoded | None:
        document = self._chats.encode(name, fields)
        return document and document._replace(row_label=(float(desirable),))

    def _labelled(self, row: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
        """The prompt with its completion, and whether it is desirable."""
        desirable = field_of(row, self._label, f"{MEND}, or name the field of the label: data.label_field")
        if not isinstance(desirable, bool):
            rule = f"{self._label} says whether the completion is desirable, and here is {desirable!r}"
            raise RecordError(rule, "Write true or false")
        _, said = (field_of(row, key, _ROW) for key in ("prompt", "completion"))
        self._pairs.completion("completion", said, _ROW)
        return {key: value for key, value in row.items() if key != self._label}, desirable
