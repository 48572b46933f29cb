"""The section `data`: what its kinds fill in, and which of its keys do not fit together."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.configs import MINIMAL, loaded, refused


def test_a_kind_fills_in_its_packing(tmp_path: Path) -> None:
    texts = loaded(tmp_path).data
    assert (texts.packing, texts.overlong) == ("stream", "cut")
    chats = loaded(tmp_path, MINIMAL, "data.kind=chat").data
    assert (chats.packing, chats.overlong) == ("none", "truncate")
    words = loaded(tmp_path, MINIMAL, "data.kind=token_classification").data
    assert (words.text_field, words.label_field, words.overlong) == ("words", "labels", "truncate")


def test_a_written_key_goes_over_that_of_its_kind(tmp_path: Path) -> None:
    chats = loaded(tmp_path, MINIMAL, "data.kind=chat", "data.packing=best_fit").data
    assert (chats.packing, chats.overlong) == ("best_fit", "truncate")


def test_sources_take_the_keys_of_the_section_that_they_leave_out(tmp_path: Path) -> None:
    data = loaded(
        tmp_path, MINIMAL, "data.path=null", "data.text_field=body", "data.validation={path: c}",
        "data.mixture=[{path: a}, {path: b, text_field: text, weight: 2}]",
    ).data  # fmt: skip
    assert [(source.path, source.text_field, source.weight) for source in data.sources] == [
        ("a", "body", 1.0),
        ("b", "text", 2.0),
    ]
    assert data.validation is not None
    assert data.validation.text_field == "body"


def test_a_path_is_a_mixture_of_one(tmp_path: Path) -> None:
    data = loaded(tmp_path, MINIMAL, "data.path=rows", "data.split=train", "data.revision=v1").data
    (source,) = data.sources
    assert (source.path, source.split, source.revision, source.epochs) == ("rows", "train", "v1", None)


@pytest.mark.parametrize(
    ("keys", "labels", "first"),
    [
        ({}, "next tokens", 1),
        ({"kind": "masked"}, "masked tokens", 0),
        ({"kind": "classification"}, "rows", 0),
        ({"kind": "token_classification"}, "tokens", 0),
    ],
)
def test_a_kind_says_what_labels_are_of(
    tmp_path: Path, keys: dict[str, str], labels: str, first: int
) -> None:
    data = loaded(tmp_path, MINIMAL, *(f"data.{key}={value}" for key, value in keys.items())).data
    assert (data.labels, data.first_label) == (labels, first)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("data.path=null", "data: one of data.path and data.mixture is needed, and here neither is"),
        ("data.mixture=[{path: a}]", "data: one of data.path and data.mixture is needed, and here both are"),
        ("data.path=null data.mixture=[{path: a, weight: 0}]", "sum to 0, so that no source gives a row"),
        ("data.document_length=8", "data.packing=stream makes no such rows. Take sequential or best_fit"),
        (
            "data.packing=best_fit data.document_length=200",
            "data.document_length=200 is above data.sequence_length=128",
        ),
        (
            "data.held_out_from=end data.validation={path: b}",
            "data.held_out_from=end with data.validation, which is what is held out. Leave one of them out",
        ),
        ("data.dummy={tokens: 8}", "data.dummy with data.kind=auto reads files. Set data.kind=dummy"),
        ("data.mask_probability=0.2", "masks tokens, and data.kind=auto none. Set data.kind=masked"),
        ("data.kind=masked data.packing=best_fit", "a row has no bounds of documents. Leave packing out"),
        ("data.kind=classification data.overlong=cut", "would part a text from its label. Take truncate"),
        (
            "data.streaming={} data.validation={path: b} data.changed=accept",
            "data.changed=accept with data.streaming: a stream goes on from numbers of records",
        ),
        ("data.revision=v1", "revision=v1 is of a data set by name, which needs its split. Give split"),
    ],
)
def test_keys_that_do_not_fit_together_are_refused(tmp_path: Path, overrides: str, message: str) -> None:
    assert message in refused(tmp_path, MINIMAL, *re.split(r" (?=data\.)", overrides))
