"""Rows longer than the model's positions: documents end at data.document_length, and begin at position 0."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.batch.loss import IGNORED
from penstock.errors import ConfigError
from penstock.train.check.before_training import Reference
from penstock.train.config.sections import TrainConfig
from penstock.train.preflight import Prepared, preflight
from penstock.train.run import run
from support.covering import every
from support.refusals import refuses
from support.tiny import QWEN3, config, metrics
from train.data.test_rows import rows_of

LONGEST, ROW = 16, 40
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {**QWEN3, "max_position_embeddings": LONGEST},
    # a table of positions: one that is too high is an error, or another weight
    "gpt2": {"model_type": "gpt2", "vocab_size": 256, "n_embd": 16, "n_layer": 2, "n_head": 2,
             "n_positions": LONGEST, "attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0,
             "bos_token_id": None, "eos_token_id": None},
}  # fmt: skip
TEXTS = [bytes(33 + (number + at) % 90 for at in range(2 + number * 7 % 37)).decode() for number in range(90)]


def made(folder: Path, family: str = "qwen3", **keys: Any) -> TrainConfig:
    (folder / "documents").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    data = {"path": str(folder / "documents"), "kind": "jsonl", "packing": "sequential",
            "sequence_length": ROW, "document_length": LONGEST, "held_out": 0.2}  # fmt: skip
    given = {f"data.{key}": value for key, value in (data | keys).items()}
    return config(folder, MODELS[family], given | {"model.dtype": "float64"}, batch_size=6)


def alone(prepared: Prepared, rows: int) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one plain model on each document of the first rows by itself."""
    source = prepared.plan.source
    model = Reference(source, prepared.auto.seed, prepared.auto.loss()).build(torch.device("cpu"))
    data, total, count = prepared.data, torch.zeros((), dtype=torch.float64), 0
    assert data.sampler is not None
    for row in data.sampler.rows(0, rows):
        for piece in data.rows.read(row):
            assert len(piece.ids) <= LONGEST
            logits = model(input_ids=torch.from_numpy(piece.ids[None])).logits[0, :-1]
            labels = torch.from_numpy(piece.labels[1:])
            total = total + torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
            count += int((labels != IGNORED).sum())
    torch.autograd.backward([total / count])
    return float(total.detach()) / count, {
        name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
    }


@pytest.mark.parametrize(
    ("family", "padded"), every(3, [("qwen3", False), ("qwen3", True), ("gpt2", False), ("gpt2", True)])
)
def test_each_document_has_the_gradients_that_it_has_alone(tmp_path: Path, family: str, padded: bool) -> None:
    given = made(tmp_path, family)
    if padded:
        tree = given.model_dump()
        tree["pipeline"] |= {"shapes": "padded", "padding": {"multiple": 32}}
        given = TrainConfig.model_validate(tree)
    prepared = preflight(given)
    content = prepared.data.batch(1).content
    assert isinstance(content, list)
    lengths = [each["input_ids"].shape[1] for each in content]
    assert max(lengths) > LONGEST, "rows are longer than the model's positions"
    assert max(int(each["position_ids"].max()) for each in content) == LONGEST - 1
    pipe = prepared.auto.build(prepared.model)
    loss, expected = alone(prepared, given.train.batch_size)
    assert pipe.step(content).loss == pytest.approx(loss, rel=1e-12)
    found = {name: parameter.grad for name, parameter in pipe.named_parameters()}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert found[name] is not None
        difference = (found[name] - gradient).abs().max() / gradient.abs().max()  # type: ignore[operator]
        assert float(difference) < 1e-10, name


def test_a_run_on_such_rows(tmp_path: Path) -> None:
    given = made(tmp_path).model_dump()
    given["train"]["check"] = "always"
    run(preflight(TrainConfig.model_validate(given)))
    assert [row["step"] for row in metrics(tmp_path) if "loss" in row][-1] == 4


@pytest.mark.parametrize("overlong", ["cut", "truncate", "drop"])
def test_a_stream_makes_such_pieces_too(tmp_path: Path, overlong: str) -> None:
    """Of the first records, in the files' order."""
    validation = {"path": str(tmp_path / "documents"), "kind": "jsonl"}
    prepared = preflight(made(tmp_path, overlong=overlong, streaming={"buffer": 1}, validation=validation))
    assert prepared.data.stream is not None
    rows, _ = prepared.data.stream.take(0, 12)
    pieces = [bytes(piece.ids.tolist()).decode() for row in range(12) for piece in rows.read(row)]
    ends = {"cut": 99, "truncate": LONGEST, "drop": 99}
    expected = [
        text[at : at + LONGEST]
        for text in TEXTS
        for at in range(0, min(len(text), ends[overlong]), LONGEST)
        if len(text[at : at + LONGEST]) > 1 and not (overlong == "drop" and len(text) > LONGEST)
    ]
    assert pieces == (expected * 2)[: len(pieces)]
    assert max(map(len, pieces)) == LONGEST


def test_padding_has_documents_of_its_own_where_one_would_get_too_long() -> None:
    rows = rows_of([3, 4, 2, 2, 8, 3], "sequential", microbatches=1, flash=True, longest=4)
    (batch,) = rows.content([0, 1])  # rows of 7 and 4 tokens
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3], [0, 1, 0, 1, 2, 3, 0]]
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 7, 9, 13, 14]
    assert batch["max_length_q"] == 4
    assert batch["labels"][1].tolist() == [-100, 9, -100, 11, -100, -100, -100]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"packing": "stream"}, "data.packing=stream"),
        ({"packing": "none"}, "data.packing=none"),
        ({"document_length": ROW + 1}, f"data.document_length={ROW + 1} .* data.sequence_length={ROW},"),
    ],
)
def test_combinations_that_cannot_be_are_refused(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made(tmp_path, **keys)


def test_a_document_longer_than_the_models_positions_is_refused(tmp_path: Path) -> None:
    positions = f"{LONGEST} positions"
    with refuses(ConfigError, f"data.document_length={LONGEST + 1}", positions):
        preflight(made(tmp_path, document_length=LONGEST + 1))
    with refuses(ConfigError, f"sequence_length={ROW}", positions, f"data.document_length={LONGEST}"):
        preflight(made(tmp_path, document_length=None))


def test_made_up_documents_are_as_long_as_they_may_be(tmp_path: Path) -> None:
    given = made(tmp_path, kind="dummy", path="dummy")
    assert given.data.dummy is not None
    assert given.data.dummy.tokens == LONGEST
