"""Labels by the model's config: their numbers, their tokens, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers import BertConfig, BertTokenizerFast

from penstock.errors import DataError
from penstock.train.encoding.labels import LabelEncoder, LabelSpace, TagEncoder
from penstock.train.encoding.tokenizer import ByteTokenizer, HuggingFace
from support.refusals import refuses

NAMES = {0: "O", 1: "PER", 2: "LOC"}
SEVERAL = "multi_label_classification"


def space(problem: str | None = None, names: dict[int, str] | None = None) -> LabelSpace:
    config = BertConfig(id2label=names or NAMES, pad_token_id=0)
    config.problem_type = problem
    return LabelSpace.of(config)


def rows(problem: str | None = None, longest: int = 8, drop: bool = False, **options: Any) -> LabelEncoder:
    return LabelEncoder(ByteTokenizer(), space(problem, **options), "text", "label", longest, drop)


def tags(tokenizer: Any = None, longest: int = 8, drop: bool = False) -> TagEncoder:
    return TagEncoder(tokenizer or ByteTokenizer(), space(), "words", "labels", longest, drop)


@pytest.mark.parametrize(
    ("problem", "names", "label", "numbers"),
    [
        (None, None, 2, (2.0,)),
        (None, None, "PER", (1.0,)),
        (SEVERAL, None, [1, 0, 1.0], (1.0, 0.0, 1.0)),
        (SEVERAL, None, ["LOC", "O"], (1.0, 0.0, 1.0)),
        ("regression", None, [0.1, -2, 1e30], (0.1, -2.0, 1e30)),
        (None, {0: "score"}, 0.1, (0.1,)),
    ],
)
def test_a_label_becomes_its_numbers(problem: str | None, names: Any, label: Any, numbers: Any) -> None:
    made = rows(problem, names=names).encode("a line 1", {"text": "abc", "label": label, "other": 1})
    assert made is not None
    assert (made.row_label, made.ids.tolist(), made.labels) == (numbers, [97, 98, 99], None)


def test_a_long_text_is_cut_or_dropped() -> None:
    record = {"text": "abcdefghij", "label": 0}
    made = rows().encode("a line 1", record)
    assert made is not None
    assert len(made.ids) == 8
    assert rows(drop=True).encode("a line 1", record) is None
    made = rows().encode("a line 1", {"input_ids": [5] * 9, "label": 0})
    assert made is not None
    assert made.ids.tolist() == [5] * 8


@pytest.mark.parametrize(
    ("problem", "label", "said"),
    [
        (None, 3, "the model has classes 0 to 2 (num_labels), and the label is 3"),
        (None, -1, "the label is -1"),
        (None, "ORG", "the label 'ORG' is no class of the model: O, PER, LOC"),
        (None, 1.0, "a label is the number of a class, or its name, and here is a float"),
        (None, [1, 0, 0], "here is a list"),
        (None, True, "here is a bool"),
        (None, None, "here is a NoneType"),
        (SEVERAL, 1, "label is a list, of 3 numbers"),
        (SEVERAL, [1, 0], "label has 2 numbers, and the model's head 3"),
        (SEVERAL, [1, 0, 0.5], "and here is 0.5"),
        ("regression", [1, 2, float("nan")], "finite numbers"),
        ("regression", ["1", 2, 3], "finite numbers"),
    ],
)
def test_a_wrong_label_is_refused(problem: str | None, label: Any, said: str) -> None:
    with refuses(DataError, "data file a line 1", said):
        rows(problem).encode("a line 1", {"text": "abc", "label": label})


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"text": "a"}, "it has no field 'label'"),
        ({"label": 0}, "it has no field 'text'"),
        ({"label": 0, "text": 5}, "text is a text"),
        ({"label": 0, "text": ""}, "it has no token"),
        ({"label": 0, "input_ids": [-1]}, "input_ids is a list of token ids"),
    ],
)
def test_a_record_without_text_or_label_is_refused(record: Any, said: str) -> None:
    with refuses(DataError, "data file a line 1", said):
        rows().encode("a line 1", record)


def test_a_words_label_is_on_its_first_token() -> None:
    made = tags().encode("a line 1", {"words": ["ab", "c", "def"], "labels": [1, "LOC", -100]})
    assert made is not None
    assert bytes(made.ids.tolist()) == b"ab c def"
    assert made.labels is not None
    assert made.labels.tolist() == [1, -100, -100, 2, -100, -100, -100, -100]
    made = tags(longest=2).encode("a line 1", {"input_ids": [7, 8, 9], "labels": [1, -100, 0]})
    assert made is not None
    assert made.labels is not None
    assert (made.ids.tolist(), made.labels.tolist()) == ([7, 8], [1, -100])


def test_labels_of_words_are_those_of_run_ner(tmp_path: Any) -> None:
    """The rule of transformers' example, over a tokenizer with special tokens and parts of words."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "ada", "sleep", "##s", "##ing", "un"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    own = BertTokenizerFast(vocab={word: at for at, word in enumerate(words)})
    own.save_pretrained(tmp_path)
    record: dict[str, Any] = {"words": ["ada", "sleeps", "unsleeping", "ada"], "labels": [1, 2, 0, 1]}
    made = tags(HuggingFace(str(tmp_path)), longest=9).encode("a line 1", record)
    cut = own(record["words"], is_split_into_words=True, truncation=True, max_length=9)
    expected, before = [], None
    for owner in cut.word_ids():
        expected.append(-100 if owner is None or owner == before else record["labels"][owner])
        before = owner
    assert made is not None
    assert made.labels is not None
    assert made.ids.tolist() == cut["input_ids"]
    assert made.labels.tolist() == expected
    assert np.count_nonzero(made.labels != -100) >= 3
    text = LabelEncoder(HuggingFace(str(tmp_path)), space(), "text", "label", 3).encode(
        "a line 1", {"text": "ada sleeps ada", "label": 0}
    )
    assert text is not None
    assert own.convert_ids_to_tokens(text.ids.tolist()) == [
        "[CLS]",
        "ada",
        "[SEP]",
    ]  # a cut text keeps its end


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"words": ["a", "b"], "labels": [1]}, "it has 1 labels for 2 words"),
        ({"input_ids": [1, 2], "labels": [1, 2, 0]}, "it has 3 labels for 2 tokens"),
        ({"words": ["a"], "labels": ["ORG"]}, "'ORG' is no class"),
        ({"words": ["a"], "labels": [3]}, "classes 0 to 2"),
        ({"words": "a b", "labels": [1, 2]}, "words is a list of words"),
        ({"words": ["a"], "labels": "PER"}, "labels is a list of labels"),
        ({"words": ["a"], "labels": [-100]}, "none of its first 8 tokens has a label"),
        ({"words": ["a"]}, "it has no field 'labels'"),
    ],
)
def test_words_and_labels_that_do_not_fit_are_refused(record: Any, said: str) -> None:
    with refuses(DataError, "data file a line 1", said):
        tags().encode("a line 1", record)


@pytest.mark.parametrize(
    ("problem", "numbers", "said"),
    [(None, (1.0,), "PER"), (SEVERAL, (1.0, 0.0, 1.0), "O, LOC"), (SEVERAL, (0.0,) * 3, "none"),
     ("regression", (0.5, 2.0, 1.0), "0.5, 2, 1")],
)  # fmt: skip
def test_a_label_in_words(problem: str | None, numbers: Any, said: str) -> None:
    assert space(problem).shown(numbers) == said
