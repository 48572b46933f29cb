"""Preferences in TRL's formats become TRL's tokens; a record that is no pair is refused."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import AutoPipeline
from penstock.batch.loss import IGNORED
from penstock.batch.preferences import DPO
from penstock.errors import DataError
from penstock.train.encoding.preference import PreferenceEncoder
from penstock.train.encoding.tokenizer import HuggingFace
from support.chats import text_of
from support.covering import some
from support.families import tiny_model
from support.reference import assert_gradients, gradients_of
from support.refusals import refuses
from support.trl import trl_settings, trl_steps

USER, YES, NO = ({"role": role, "content": said} for role, said in
                 (("user", "2 + 3?"), ("assistant", "5"), ("assistant", "six")))  # fmt: skip
FORMS: dict[str, dict[str, Any]] = {
    "texts": {"prompt": "2 + 3? ", "chosen": "5", "rejected": "six"},
    "texts that begin alike": {"chosen": "2 + 3? 5", "rejected": "2 + 3? six"},
    "messages": {"prompt": [USER], "chosen": [YES], "rejected": [NO]},
    "messages that begin alike": {"chosen": [USER, YES], "rejected": [USER, NO]},
    "a prompt twice": {"prompt": "2 + 3?", "chosen": [USER, YES], "rejected": [USER, NO]},
    "one begins the other": {"chosen": "abc", "rejected": "abcd"},
}


def encoded(row: dict[str, Any], **options: Any) -> list[tuple[list[int], list[int]]]:
    pair = PreferenceEncoder(HuggingFace("bytes"), **options).encode("a.jsonl line 1", row)
    assert pair is not None
    return [(half.ids.tolist(), [] if half.labels is None else half.labels.tolist()) for half in pair]


@pytest.mark.parametrize("name", FORMS)
def test_the_completion_counts_and_the_prompt_does_not(name: str) -> None:
    (ids, labels), (other, rejected) = encoded(FORMS[name])
    start = next(at for at, label in enumerate(labels) if label != IGNORED)
    assert labels == [IGNORED] * start + ids[start:]
    assert rejected == [IGNORED] * start + other[start:]
    assert ids[:start] == other[:start]
    said = ("c", "cd") if name == "one begins the other" else ("5", "six")
    assert [
        text_of(of).removesuffix("\n").removesuffix("<|im_end|>").strip() for of in (labels, rejected)
    ] == [*said]


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed")
@pytest.mark.parametrize(
    "name", ["texts that begin alike", "messages that begin alike", "one begins the other"]
)
def test_the_prompt_is_that_of_trl(name: str) -> None:
    from trl.data_utils import extract_prompt

    assert encoded(FORMS[name]) == encoded(extract_prompt(FORMS[name]))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no other half": ({"prompt": "a", "chosen": "b"}, "it has no field 'rejected'"),
    "empty": ({"prompt": "a", "chosen": "", "rejected": "c"}, "chosen is empty"),
    "no messages": ({"prompt": [USER], "chosen": [YES], "rejected": []}, "rejected is empty"),
    "two prompts": ({"chosen": "a b", "rejected": "c d"}, "no prompt in common"),
    "two chats": ({"chosen": [USER, YES], "rejected": [{**USER, "content": "?"}, NO]}, "no prompt in common"),
    "two forms": ({"prompt": "a", "chosen": "b", "rejected": [NO]}, "the other a list of messages"),
    "a number": ({"prompt": "a", "chosen": 5, "rejected": "c"}, "chosen is a int"),
    "a weight": ({"prompt": [USER], "chosen": [{**YES, "weight": 0}], "rejected": [NO]}, "has weight"),
    "more": ({"prompt": "a", "chosen": "b", "rejected": "c", "score": 1}, "nothing reads 'score'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_record_that_is_no_pair_is_refused(name: str) -> None:
    row, rule = REFUSED[name]
    with refuses(DataError, "data file a.jsonl line 1", rule):
        encoded(row)


def test_fields_can_be_ignored_and_messages_need_a_template() -> None:
    row = {"prompt": "a ", "chosen": "b", "rejected": "c", "score": 1}
    assert encoded(row, ignored=("score",)) == encoded(
        {key: row[key] for key in ("prompt", "chosen", "rejected")}
    )
    plain = HuggingFace("bytes")
    plain.own.chat_template = None
    made = PreferenceEncoder(plain)
    assert made.encode("a", FORMS["texts"]) is not None
    with refuses(DataError, "data file a", "no chat template"):
        made.encode("a", FORMS["messages"])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed")
@pytest.mark.parametrize("variant", some(["sigmoid", "ipo"], "sigmoid"))
def test_steps_are_those_of_trls_trainer(variant: Any, tmp_path: Path) -> None:
    """Records, losses, rewards and every gradient of three steps of DPOTrainer, on the same pairs."""
    rows = [{"prompt": "q", "chosen": "a" * (4 + at % 9), "rejected": "b" * (4 + at % 4)} for at in range(12)]
    from trl import DPOConfig, DPOTrainer

    own = HuggingFace("bytes").own
    own.pad_token = own.eos_token
    trained = tiny_model("llama", vocab_size=258)
    settings = trl_settings(DPOConfig, tmp_path, loss_type=variant, beta=0.1)
    gradients, logs = trl_steps(DPOTrainer, settings, trained, rows, own, ref_model=copy.deepcopy(trained))
    loss, plain = DPO(0.1, variant), tiny_model("llama", vocab_size=258)
    pipe = AutoPipeline(ranks=2, microbatches=3, loss_fn=loss).build(plain)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=1e-3)
    batches = [batch_of(rows[at : at + 4], own) for at in range(0, 12, 4)]
    references = [pipe.logprobs(batch) for batch in batches]
    for batch, reference, expected, said in zip(batches, references, gradients, logs, strict=True):
        optimizer.zero_grad()
        result, metrics = pipe.step(batch, reference_logps=reference), loss.metrics()
        assert result.loss == pytest.approx(said["loss"], rel=1e-5)
        for name in ("rewards/margins", "rewards/accuracies", "logps/chosen", "logps/rejected"):
            assert metrics[name] == pytest.approx(said[name], rel=1e-4, abs=1e-5), name
        assert_gradients(gradients_of(pipe), expected, 1e-4)
        optimizer.step()


def batch_of(rows: list[dict[str, Any]], tokenizer: Any) -> dict[str, torch.Tensor]:
    halves = [half for row in rows for half in encoded(row)]
    length = max(len(ids) for ids, _ in halves)
    ids, labels = (
        torch.tensor([half[at] + [pad] * (length - len(half[at])) for half in halves])
        for at, pad in enumerate((tokenizer.pad_token_id, IGNORED))
    )
    return {"input_ids": ids, "labels": labels}
