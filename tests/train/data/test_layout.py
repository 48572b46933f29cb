from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.train.config.sections import TrainConfig
from penstock.train.data.labelled import LabelledLayout
from penstock.train.data.layout import layout_of
from penstock.train.data.pairs import HeadPairs, PairLayout
from penstock.train.data.rows import BatchLayout, DocumentLayout, StreamLayout
from penstock.train.data.unpaired import UnpairedLayout
from penstock.train.encoding.labels import LabelSpace
from penstock.train.encoding.tokenizer import ByteTokenizer
from support.refusals import refuses
from support.tiny import tree

SPACE = LabelSpace("regression", ("LABEL_0",), 7)
LAYOUTS: list[tuple[dict[str, Any], str | None, type[BatchLayout]]] = [
    ({}, None, StreamLayout),
    ({"packing": "best_fit"}, None, DocumentLayout),
    ({"kind": "classification"}, None, LabelledLayout),
    ({"kind": "token_classification"}, None, LabelledLayout),
    ({"kind": "preference"}, "dpo", PairLayout),
    ({"kind": "preference"}, "reward", HeadPairs),
    ({"kind": "pair"}, "contrastive", HeadPairs),
    ({"kind": "unpaired"}, "kto", UnpairedLayout),
]


def layout(folder: Path, data: dict[str, Any], loss: str | None, space: LabelSpace = SPACE) -> BatchLayout:
    made = tree(folder)
    made["data"] |= data
    made["train"]["loss"] = loss
    return layout_of(TrainConfig.model_validate(made), ByteTokenizer(), None, False, space)


@pytest.mark.parametrize(("data", "loss", "kind"), LAYOUTS)
def test_data_labels_and_loss_determine_the_layout(
    data: dict[str, Any], loss: str | None, kind: type[BatchLayout], tmp_path: Path
) -> None:
    made = layout(tmp_path, data, loss)
    assert type(made) is kind
    if isinstance(made, PairLayout | UnpairedLayout):
        assert made.refers == (loss in ("dpo", "kto"))


@pytest.mark.parametrize(
    ("data", "loss", "key"),
    [
        ({"kind": "classification"}, None, "data.kind=classification"),
        ({"kind": "pair"}, "contrastive", "train.loss=contrastive"),
    ],
)
def test_a_head_over_rows_knows_which_tokens_are_padding(
    data: dict[str, Any], loss: str, key: str, tmp_path: Path
) -> None:
    with refuses(ConfigError, "a model without pad_token_id", key):
        layout(tmp_path, data, loss, replace(SPACE, pad=None))
