"""Fine-tuning on chats: every gradient is that of one process with each document alone; runs resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.batch.loss import IGNORED
from penstock.train.config.load import load_config
from penstock.train.config.sections import TrainConfig
from penstock.train.preflight import preflight
from penstock.train.run import run
from support.reference import assert_gradients, gradients_of
from support.same_runs import resumes_bit_for_bit
from support.tiny import QWEN3, checkpoint, config
from support.twin import documents_alone

ROOT = Path(__file__).parents[2]
MODEL = {**QWEN3, "vocab_size": 258}


def chats(folder: Path, count: int = 60) -> str:
    """Answers of 1 to 9 letters, so that microbatches differ in the tokens that count."""
    lines = []
    for number in range(count):
        said = [("user", "q" * (1 + number % 5)), ("assistant", "a" * (1 + number % 9))]
        lines.append(json.dumps({"messages": [{"role": role, "content": text} for role, text in said]}))
    (folder / "chats.jsonl").write_text("\n".join(lines))
    return str(folder / "chats.jsonl")


def with_chats(folder: Path, keys: dict[str, Any] | None = None, **train: Any) -> TrainConfig:
    data = {"path": chats(folder), "kind": "chat", "sequence_length": 64, "held_out": 0.2, "packing": "none"}
    return config(
        folder, MODEL, {f"data.{key}": value for key, value in data.items()} | (keys or {}), **train
    )


@pytest.mark.parametrize("packing", ["none", "best_fit", "stream"])
def test_every_gradient_is_that_of_the_mean_over_the_tokens_that_count(tmp_path: Path, packing: str) -> None:
    prepared = preflight(
        with_chats(tmp_path, {"data.packing": packing, "model.dtype": "float64"}, batch_size=5)
    )
    pipe = prepared.auto.build(prepared.model)
    tokens, loss, gradients = documents_alone(prepared, 5)
    batch = prepared.data.batch(1).content
    parts: Any = batch
    if isinstance(batch, dict):  # as the pipeline splits it
        parts = [{name: each[of] for name, each in batch.items()} for of in (slice(3), slice(3, 5))]
    assert len({int((part["labels"] != IGNORED).sum()) for part in parts}) > 1
    result = pipe.step(batch)
    assert result.tokens == tokens
    assert result.loss == pytest.approx(loss, rel=1e-12)
    found = gradients_of(pipe)
    assert found.keys() == gradients.keys()
    assert_gradients(found, gradients, 1e-10)


MIXTURE = {
    "data.path": None,
    "data.mixture": [
        {"path": "chats.jsonl", "weight": 2, "epochs": 2, "kind": "chat"},
        {"path": "text", "kind": "text", "weight": 1},
    ],
    "data.packing": "stream",
}
STREAMING = {"data.streaming": {"buffer": 5}, "data.packing": "sequential",
             "data.validation": {"path": "chats.jsonl"}}  # fmt: skip


@pytest.mark.parametrize("keys", [MIXTURE, STREAMING], ids=["mixture", "streaming"])
def test_a_run_on_such_data_resumes_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    made = with_chats(tmp_path, keys, steps=4, checkpoint_every=2)
    run(preflight(made))
    resumes_bit_for_bit(tmp_path, made, ("step", "loss", "held_out_loss"))


def test_a_run_says_what_counts(tmp_path: Path) -> None:
    made = with_chats(tmp_path, steps=2, checkpoint_every=1)
    prepared = preflight(made)
    assert prepared.notes[0].startswith("the loss counts ")
    run(prepared)
    state = json.loads((checkpoint(tmp_path, 1) / "state.json").read_text())
    facts = prepared.data.rows.sources[0].store.facts
    assert state["data"] == {
        "digest": prepared.data.digest,
        "rows": made.train.batch_size,
        "position": None,
        "sources": [
            {
                "path": made.data.path,
                "digest": facts.digest,
                "documents": facts.documents,
                "tokens": facts.tokens,
            }
        ],
    }


def test_the_shipped_config_of_fine_tuning_finds_its_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole run takes two minutes: `penstock train configs/sft_full.yaml`."""
    monkeypatch.chdir(ROOT)
    prepared = preflight(load_config("configs/sft_full.yaml"))
    facts = prepared.data.rows.sources[0].store.facts
    assert facts.documents == 600
    assert 0.2 < facts.counted / facts.tokens < 0.6
    assert prepared.data.rows.sources[0].store.lengths.max() <= 384
