"""From a record of two texts that belong together to two documents, for an embeddings model.

    {"anchor": "How old is Ada?", "positive": "Ada is 36."}        also query or question with answer, ...

The formats are those of sentence-transformers; there the order of the columns says which is which, here their
names do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.train.data.sources import MEND, RecordError, blaming
from penstock.train.encoding.chat import Encoded
from penstock.train.encoding.record import check_unicode, field_of, refuse_keys
from penstock.train.encoding.tokenizer import Tokenizer

Fields = tuple[str, str]
# the names that data sets of pairs have
_KNOWN: tuple[Fields, ...] = (
    ("anchor", "positive"),
    ("query", "positive"),
    ("query", "answer"),
    ("query", "document"),
    ("question", "answer"),
    ("sentence1", "sentence2"),
)
_NAME = f"{MEND}, or name its two fields: data.pair_fields: [anchor, positive]"


@dataclass(frozen=True)
class PairEncoder:
    """Makes tokens of pairs, each text with the special tokens that the tokenizer adds.

    Attributes:
        fields: of anchor and positive; None takes those of `_KNOWN` that a record has
        longest: tokens of a text; of a longer one the end is left out, and special tokens stay
        drop: whether a pair with a longer text is left out instead
        ignored: data.ignored_fields
    """

    tokenizer: Tokenizer
    fields: Fields | None
    longest: int
    drop: bool = False
    ignored: Sequence[str] = ()

    def encode(self, name: str, row: Mapping[str, Any]) -> tuple[Encoded, Encoded] | None:
        """Both documents; None for a pair that is dropped. Raises DataError that names the record."""
        with blaming(f"data file {name}"):
            names = self.fields or _fields_of(row)
            unread = {key for key, value in row.items() if value is not None} - {*names, *self.ignored}
            refuse_keys(unread, (), self.ignored)
            anchor, positive = (self._ids(row, field) for field in names)
        if self.drop and max(len(anchor), len(positive)) > self.longest:
            return None
        return Encoded(np.asarray(anchor, np.uint32)), Encoded(np.asarray(positive, np.uint32))

    def _ids(self, row: Mapping[str, Any], field: str) -> list[int]:
        text = field_of(row, field, _NAME)
        if not isinstance(text, str) or not text.strip():
            shown = f"a {type(text).__name__}" if not isinstance(text, str) else "a blank one"
            raise RecordError(f"{field} is a text, and here is {shown}", MEND)
        check_unicode(field, text)
        return self.tokenizer.prompt(text, None if self.drop else self.longest)


def _fields_of(row: Mapping[str, Any]) -> Fields:
    """Raises RecordError for a record without any of the known pairs."""
    for names in _KNOWN:
        if all(name in row for name in names):
            return names
    known = ", ".join(" and ".join(names) for names in _KNOWN)
    raise RecordError(
        f"it has the fields {', '.join(map(repr, row)) or 'none'}, and no pair of {known}", _NAME
    )
