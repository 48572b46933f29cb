from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from penstock.batch.kto import KTO
from penstock.batch.preferences import DPO, ORPO, Reward, SimPO
from penstock.batch.row_loss import RowLoss
from penstock.train.config.loss import LossValue
from penstock.train.config.sections import TrainConfig
from support.tiny import tree

ADAPTER: TypeAdapter[Any] = TypeAdapter(LossValue)


@pytest.mark.parametrize(
    ("keys", "loss"),
    [
        ("dpo", DPO()),
        ({"kind": "dpo", "beta": 0.3, "variant": "ipo"}, DPO(0.3, "ipo")),
        ({"kind": "orpo", "beta": 0.2}, ORPO(0.2)),
        ({"kind": "simpo", "gamma": 0.5}, SimPO(2.0, 0.5)),
        ({"kind": "reward", "center": 0.01}, Reward(0.01)),
        ({"kind": "kto", "undesirable_weight": 1.5}, KTO(undesirable_weight=1.5)),
    ],
)
def test_a_section_makes_its_loss(keys: Any, loss: RowLoss) -> None:
    section = ADAPTER.validate_python(keys)
    assert section.make() == loss
    assert ADAPTER.validate_python(section.model_dump()) == section


def test_no_loss_is_that_of_next_tokens_and_another_name_is_refused() -> None:
    assert ADAPTER.validate_python(None) is None
    for wrong in ("grpo", {"beta": 0.1}, 3, {"kind": "dpo", "gamma": 1.0}):
        with pytest.raises(ValidationError, match=r"is no loss|gamma"):
            ADAPTER.validate_python(wrong)


PAIRS = {"kind": "preference", "path": "pairs.jsonl", "tokenizer": "bytes", "sequence_length": 16}
ROWS = {**PAIRS, "kind": "unpaired"}


@pytest.mark.parametrize(
    ("data", "train", "said"),
    [
        (PAIRS, {}, "without train.loss"),
        ({}, {"loss": "dpo"}, "has none; leave train.loss out"),
        ({**PAIRS, "overlong": "cut"}, {"loss": "dpo"}, "would compare pieces"),
        ({**PAIRS, "packing": "best_fit"}, {"loss": "dpo"}, "leave packing out"),
        ({**PAIRS, "loss_on": "all"}, {"loss": "dpo"}, "leave loss_on out"),
        ({**PAIRS, "validation": {"path": "a", "kind": "chat"}}, {"loss": "dpo"}, "next to kind=chat"),
        (ROWS, {}, "data.kind=unpaired without train.loss; set train.loss=kto"),
        (PAIRS, {"loss": "kto"}, "data.kind=preference has none; .* set data.kind=unpaired"),
        (ROWS, {"loss": "dpo"}, "data.kind=unpaired has none; .* set data.kind=preference"),
        (
            ROWS,
            {"loss": "kto", "ramp": [{"until": 1, "batch_size": 1}]},
            "train.loss=kto with steps of 1 row",
        ),
        ({**ROWS, "packing": "stream"}, {"loss": "kto"}, "a row is one whole completion; leave packing out"),
        (PAIRS, {"loss": "dpo", "z_loss": 0.1}, "train.z_loss=0.1 is not for train.loss=dpo"),
        (PAIRS, {"loss": "orpo", "ramp": [{"until": 1, "sequence_length": 8}]}, "ramp with sequence_length"),
    ],
)
def test_a_loss_and_data_that_do_not_fit_are_refused(
    tmp_path: Any, data: dict[str, Any], train: dict[str, Any], said: str
) -> None:
    made = tree(tmp_path)
    made["data"] = data or made["data"]
    made["train"] |= train
    with pytest.raises(ValidationError, match=said):
        TrainConfig.model_validate(made)


@pytest.mark.parametrize(("loss", "data"), [("dpo", PAIRS), ("kto", ROWS)])
def test_measured_balance_has_no_reference_yet(loss: str, data: Any, tmp_path: Any) -> None:
    made = tree(tmp_path)
    made["data"], made["pipeline"]["balance"] = data, "measured"
    del made["pipeline"]["head_weight"]
    made["train"]["loss"] = loss
    with pytest.raises(ValidationError, match=rf"before train.loss={loss} has its reference"):
        TrainConfig.model_validate(made)
