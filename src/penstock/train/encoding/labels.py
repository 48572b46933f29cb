"""Records with labels for a model's own head: a label for the whole text, or one for each word.

    {"text": "Good!", "label": 2}               one class: its number, or its name in the model's config
    {"text": "Good!", "label": [1, 0, 1]}       several of three classes, or a list of their names
    {"text": "Good!", "label": 0.7}             a number; of several numbers, a list
    {"words": ["Ada", "sleeps"], "labels": ["PER", "O"]}          a class for each word
    {"input_ids": [5, 6, 7], "labels": [-100, 1, 0]}              a class for each token

The model's config says which labels there are: problem_type, num_labels, id2label.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PretrainedConfig

from penstock.batch.loss import IGNORED, ProblemType
from penstock.train.data.sources import MEND, TOKENS, RecordError, blaming
from penstock.train.encoding.chat import Encoded, Labels
from penstock.train.encoding.record import check_unicode, field_of
from penstock.train.encoding.tokenizer import Tokenizer

_SHOWN = 8  # names of classes in an error
_MOST = 1 << 31  # all ids are below it


@dataclass(frozen=True)
class LabelSpace:
    """The labels that a model's head knows.

    Attributes:
        problem: what a row's label is
        names: of the classes, in the order of their numbers
        pad: the id of padding; None if the model's config has none
    """

    problem: ProblemType
    names: tuple[str, ...]
    pad: int | None

    @classmethod
    def of(cls, config: PretrainedConfig) -> LabelSpace:
        """Of a model by its config. Without a problem_type: a class, or with num_labels=1 a number."""
        count, problem = config.num_labels, config.problem_type
        if problem is None:
            problem = "regression" if count == 1 else "single_label_classification"
        names = tuple(str(config.id2label.get(at, f"LABEL_{at}")) for at in range(count))
        return cls(problem, names, config.get_text_config().pad_token_id)

    def row_label(self, value: object) -> tuple[float, ...]:
        """The numbers of a row's label. Raises RecordError."""
        if self.problem == "single_label_classification":
            return (float(self.number_of(value)),)
        if self.problem == "regression":
            return self._numbers(value if isinstance(value, list) else [value])
        if not isinstance(value, list):
            raise RecordError(f"label is a list, of {self._several}, and here is {_shown(value)}")
        if value and all(isinstance(name, str) for name in value):
            chosen = {self.number_of(name) for name in value}
            return tuple(float(at in chosen) for at in range(len(self.names)))
        numbers = self._numbers(value)
        if wrong := next((number for number in numbers if number not in (0, 1)), None):
            raise RecordError(f"label is a list of {self._several}, and here is {wrong:g}")
        return numbers

    def shown(self, row_label: tuple[float, ...]) -> str:
        """A row's label in words: the names of its classes, or its numbers."""
        if self.problem == "regression":
            return ", ".join(f"{number:g}" for number in row_label)
        if self.problem == "single_label_classification":
            return self.names[int(row_label[0])]
        chosen = [name for name, number in zip(self.names, row_label, strict=True) if number]
        return ", ".join(chosen) or "none"

    @property
    def _several(self) -> str:
        return f"{len(self.names)} numbers that are 0 or 1, or of names of classes"

    def number_of(self, value: object) -> int:
        """The number of a class, given as itself or as its name. Raises RecordError."""
        if isinstance(value, str):
            if value not in self.names:
                raise RecordError(f"the label {value!r} is no class of the model: {self._known}", _REMEDY)
            return self.names.index(value)
        if not isinstance(value, int) or isinstance(value, bool):
            rule = f"a label is the number of a class, or its name, and here is {_shown(value)}"
            raise RecordError(rule, _SET_PROBLEM)
        if not 0 <= value < len(self.names):
            rule = f"the model has classes 0 to {len(self.names) - 1} (num_labels), and the label is {value}"
            raise RecordError(rule, _REMEDY)
        return value

    @property
    def _known(self) -> str:
        more = ", ..." if len(self.names) > _SHOWN else ""
        return ", ".join(self.names[:_SHOWN]) + more

    def _numbers(self, values: list[Any]) -> tuple[float, ...]:
        for value in values:
            if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
                raise RecordError(f"label has finite numbers, and here is {_shown(value)}")
        if len(values) != len(self.names):
            rule = f"label has {len(values)} numbers, and the model's head {len(self.names)} (num_labels)"
            raise RecordError(rule, _REMEDY)
        return tuple(map(float, values))


_SET_PROBLEM = f"{MEND}; for numbers or several classes set problem_type in the model's config"
_REMEDY = f"{MEND}, or set num_labels and id2label in the model's config"


def _shown(value: object) -> str:
    return f"a {type(value).__name__}, {str(value)[:40]}"


@dataclass(frozen=True)
class LabelEncoder:
    """Makes tokens of records, each with one label.

    Attributes:
        text, label: the fields of a record; without `text`, input_ids are read
        longest: tokens of a text; of a longer one the end is left out, and special tokens stay
        drop: whether a longer text is left out instead
    """

    tokenizer: Tokenizer
    space: LabelSpace
    text: str
    label: str
    longest: int
    drop: bool = False

    def encode(self, name: str, row: Mapping[str, Any]) -> Encoded | None:
        """The tokens and the label of a record; None for one that is dropped. Raises DataError."""
        with blaming(f"data file {name}"):
            row_label = self.space.row_label(field_of(row, self.label, _NAME_LABEL))
            ids = self._ids(row)
            if not ids:
                raise RecordError("it has no token", "Leave it out, or give it a text")
        if len(ids) > self.longest and self.drop:
            return None
        return Encoded(np.asarray(ids[: self.longest], dtype=np.uint32), row_label=row_label)

    def _ids(self, row: Mapping[str, Any]) -> Sequence[int]:
        if self.text not in row and TOKENS[0] in row:
            return _whole_numbers(TOKENS[0], row[TOKENS[0]])
        text = field_of(row, self.text, f"{MEND}, or name the field of the text: data.text_field")
        if not isinstance(text, str):
            raise RecordError(f"{self.text} is a text, and here is {_shown(text)}")
        check_unicode(self.text, text)
        return self.tokenizer.prompt(text, None if self.drop else self.longest)


_NAME_LABEL = f"{MEND}, or name the field of the label: data.label_field"


@dataclass(frozen=True)
class TagEncoder(LabelEncoder):
    """Makes tokens of words, each with a label: on its first token, and -100 on the others."""

    def encode(self, name: str, row: Mapping[str, Any]) -> Encoded | None:
        with blaming(f"data file {name}"):
            given = field_of(row, self.label, _NAME_LABEL)
            if not isinstance(given, list):
                raise RecordError(f"{self.label} is a list of labels, and here is {_shown(given)}")
            ids, tags = self._tagged(row, [self._tag(value) for value in given])
            if not (tags[: self.longest] != IGNORED).any():
                raise RecordError(f"none of its first {self.longest} tokens has a label", "Leave it out")
        if len(ids) > self.longest and self.drop:
            return None
        return Encoded(np.asarray(ids[: self.longest], dtype=np.uint32), tags[: self.longest])

    def _tag(self, value: object) -> int:
        return IGNORED if value == IGNORED else self.space.number_of(value)

    def _tagged(self, row: Mapping[str, Any], given: list[int]) -> tuple[Sequence[int], Labels]:
        """The ids, and the label of each."""
        if self.text not in row and TOKENS[0] in row:
            ids = _whole_numbers(TOKENS[0], row[TOKENS[0]])
            _check_equal(len(given), len(ids), "tokens")
            return ids, np.array(given, dtype=np.int32)
        words = field_of(row, self.text, f"{MEND}, or name the field of the words: data.text_field")
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise RecordError(f"{self.text} is a list of words, and here is {_shown(words)}")
        _check_equal(len(given), len(words), "words")
        check_unicode(self.text, words)
        ids, owners = self.tokenizer.words(words, None if self.drop else self.longest)
        firsts = [owner != before for owner, before in zip(owners, [None, *owners], strict=False)]
        tags = [
            IGNORED if owner is None or not first else given[owner]
            for owner, first in zip(owners, firsts, strict=True)
        ]
        return ids, np.array(tags, dtype=np.int32)


def _check_equal(labels: int, others: int, of: str) -> None:
    if labels != others:
        raise RecordError(f"it has {labels} labels for {others} {of}", f"Give one for each, or {IGNORED}")


def _whole_numbers(field: str, value: object) -> list[int]:
    if not isinstance(value, list) or not all(type(token) is int and 0 <= token < _MOST for token in value):
        raise RecordError(f"{field} is a list of token ids, 0 or more, and here is {_shown(value)}")
    return value
