"""Whole runs in one process: what they leave, that they resume bit for bit, and what they refuse first."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from penstock.batch.padding import Padding
from penstock.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    ModelError,
    PartitionError,
    RunError,
    WorldSizeError,
)
from penstock.models.activation_checkpointing import Checkpointing
from penstock.models.weights.folder import check_folder
from penstock.train.checkpoints import NEWEST, _with_defaults, changes
from penstock.train.config.sections import ModelSection, PipelineSection, TrainConfig
from penstock.train.config.values import CheckpointingSection
from penstock.train.data.rows import Batch, DocumentRows
from penstock.train.run import preflight, run
from penstock.train.settings import make_auto
from support.tiny import GPT2_WITH_DROPOUT, QWEN3, config


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    return {f"{file.name} {key}": value for file in sorted(checkpoint.glob("*.safetensors"))
            for key, value in load_file(file).items()}  # fmt: skip


def whole(batch: Batch) -> dict[str, torch.Tensor]:
    assert isinstance(batch.content, dict)
    return batch.content


def with_documents(made: TrainConfig, folder: Path, **pipeline: Any) -> TrainConfig:
    """`made`, on documents of 2 to 24 letters; rows are of 16."""
    texts = (bytes(range(33, 35 + number % 23)).decode() for number in range(80))
    (folder / "text").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    data = made.data.model_copy(update={"kind": "jsonl", "packing": pipeline.pop("packing", "best_fit")})
    section = PipelineSection.model_validate({**made.pipeline.model_dump(), **pipeline})
    return made.model_copy(update={"data": data, "pipeline": section})


def with_output(made: TrainConfig, **output: Any) -> TrainConfig:
    return made.model_copy(update={"output": made.output.model_copy(update=output)})


def test_a_run_leaves_checkpoint_metrics_and_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = with_output(config(tmp_path, steps=5, checkpoint_every=3), sample_prompt="ABC", sample_tokens=3)
    run(preflight(made))
    out = tmp_path / "out"
    checkpoint = out / "checkpoints" / "step-00000005"
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["step-00000003", "step-00000005"]
    check_folder(checkpoint)

    rows = metrics(tmp_path)
    assert [row["step"] for row in rows if "held_out_loss" in row] == [0, 2, 4, 5]
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5]
    keys = {"step", "loss", "learning_rate", "grad_norm", "tokens", "tokens_per_second", "bubble", "seconds"}
    assert all(set(row) == {*keys, "padding"} and row["tokens"] == 4 * 15 for row in steps)
    assert all(row["padding"] == 0 for row in steps)
    assert rows[0]["held_out_loss"] == pytest.approx(math.log(256), abs=0.3)
    assert rows[-1]["held_out_loss"] < rows[0]["held_out_loss"]

    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(checkpoint),
        AutoTokenizer.from_pretrained(checkpoint),
    )
    ids = torch.tensor([tokenizer("ABCDEFGHIJ")["input_ids"]])
    assert ids.tolist() == [list(b"ABCDEFGHIJ")]
    assert float(model(input_ids=ids, labels=ids).loss.detach()) < rows[0]["held_out_loss"]

    said = capsys.readouterr().out
    for part in (checkpoint, out / "metrics.jsonl", out / "timeline.svg", "predicted", "measured", "\nABC"):
        assert str(part) in said
    assert "step 1/5  loss" in said
    assert (out / "timeline.svg").read_text().lstrip().startswith("<")


@pytest.mark.parametrize("model", [QWEN3, GPT2_WITH_DROPOUT], ids=["qwen3", "gpt2 with dropout"])
def test_a_resumed_run_goes_on_bit_for_bit(tmp_path: Path, model: dict[str, Any]) -> None:
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
        run(preflight(config(tmp_path / name, model, steps=6, checkpoint_every=2)))
    checkpoints = tmp_path / "parts" / "out" / "checkpoints"
    (checkpoints / "step-00000006" / "model.safetensors.index.json").write_text("torn")
    (checkpoints / ".step-00000006.writing-abcd").mkdir()
    resumed = preflight(config(tmp_path / "parts", model, steps=6, checkpoint_every=2), NEWEST)
    assert resumed.start.done == 4
    assert "passed over" in resumed.notes[0]
    assert "never finished" in resumed.notes[0]
    assert "model.safetensors.index.json" in resumed.notes[1]
    run(resumed)

    whole = tensors(tmp_path / "whole" / "out" / "checkpoints" / "step-00000006")
    parts = tensors(checkpoints / "step-00000006")
    assert whole.keys() == parts.keys()
    assert [name for name in whole if not torch.equal(whole[name], parts[name])] == []
    exact = ("step", "loss", "grad_norm", "learning_rate", "held_out_loss")
    assert [[row.get(key) for key in exact] for row in metrics(tmp_path / "whole")] == [
        [row.get(key) for key in exact] for row in metrics(tmp_path / "parts")
    ]


def test_both_copies_of_a_slice_in_one_process_get_their_state_back(tmp_path: Path) -> None:
    """0.2.0: a process with two copies of one slice gave its optimizer state to one of them alone.

    A resumed run's copies drifted apart in silence: the state is looked up by name, and both bear one name.
    """
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
        made = config(tmp_path / name, steps=4, checkpoint_every=2)
        made = made.model_copy(update={"pipeline": made.pipeline.model_copy(update={"schedule": "dualpipe"})})
        run(preflight(made))
    checkpoints = tmp_path / "parts" / "out" / "checkpoints"
    run(preflight(made, str(checkpoints / "step-00000002")))
    whole = tensors(tmp_path / "whole" / "out" / "checkpoints" / "step-00000004")
    parts = tensors(checkpoints / "step-00000004")
    assert [name for name in whole if not torch.equal(whole[name], parts[name])] == []
    losses = [[row.get("loss") for row in metrics(tmp_path / name)] for name in ("whole", "parts")]
    assert losses[0] == losses[1]


def test_a_schedule_without_backwards_is_refused_before_a_weight_is_read(tmp_path: Path) -> None:
    """0.2.0: `schedule: inference` passed the dry run, and failed at the first step in every rank."""
    made = config(tmp_path)
    made = made.model_copy(update={"pipeline": made.pipeline.model_copy(update={"schedule": "inference"})})
    assert "pipeline.schedule=inference: it holds no backward" in refused(ConfigError, made)


def test_a_resumed_run_says_what_has_changed_since(tmp_path: Path) -> None:
    run(preflight(config(tmp_path)))
    resumed = preflight(config(tmp_path, steps=6), str(tmp_path / "out" / "checkpoints" / "step-00000004"))
    assert resumed.notes[1:] == ("changed since then: train.steps=6 (was 4)",)


def refused(kind: type[Exception], made: TrainConfig, resume: str | None = None) -> str:
    with pytest.raises(kind) as caught:
        preflight(made, resume)
    assert getattr(caught.value, "exit_code", None) == 2
    return str(caught.value)


def test_what_cannot_be_resumed_is_refused_before_a_weight_is_read(tmp_path: Path) -> None:
    made = config(tmp_path)
    assert "it holds no whole checkpoint" in refused(CheckpointError, made, NEWEST)
    run(preflight(made))
    checkpoint = tmp_path / "out" / "checkpoints" / "step-00000004"
    assert "nothing is left to do" in refused(ConfigError, made, NEWEST)
    other = config(tmp_path, {**QWEN3, "intermediate_size": 64}, steps=9)
    assert "model config intermediate_size=32: the model has 64" in refused(CheckpointError, other, NEWEST)
    longer = config(tmp_path, steps=9)
    assert "no such folder" in refused(CheckpointError, longer, str(tmp_path / "nowhere"))
    (checkpoint / "optimizer-00001-of-00001.safetensors").write_bytes(b"x")
    assert "it has 1 bytes" in refused(CheckpointError, longer, str(checkpoint))
    said = refused(CheckpointError, longer, NEWEST)
    assert "passed over" in said
    assert "it has 1 bytes" in said


@pytest.mark.parametrize(
    ("step", "model", "train"),
    [
        ("step 0: held_out_loss=nan", {"rms_norm_eps": float("nan")}, {}),
        ("step 2: loss=.*, grad_norm=nan", {}, {"clip_norm": None}),
    ],
)
def test_a_loss_that_is_not_finite_ends_the_run_before_it_spoils_the_weights(
    tmp_path: Path, step: str, model: dict[str, Any], train: dict[str, Any]
) -> None:
    made = config(tmp_path, {**QWEN3, **model}, **train)
    wild = made.model_copy(update={"optimizer": made.optimizer.model_copy(update={"learning_rate": 1e30})})
    with pytest.raises(RunError, match=rf"{step}.*Lower optimizer\.learning_rate"):
        run(preflight(wild))


def test_everything_wrong_that_needs_no_weight_is_found_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = config(tmp_path)
    few = made.model_copy(update={"pipeline": made.pipeline.model_copy(update={"ranks": 9})})
    assert refused(PartitionError, few)
    long = made.model_copy(update={"data": made.data.model_copy(update={"sequence_length": 65})})
    assert "data.sequence_length=65: the model takes 64 positions" in refused(ConfigError, long)
    unknown = made.model_copy(update={"pipeline": made.pipeline.model_copy(update={"schedule": "2f2b"})})
    assert "schedule '2f2b'" in refused(ConfigError, unknown)
    assert refused(ModelError, config(tmp_path, {"model_type": "t5"}))
    assert "output.folder" in refused(ConfigError, with_output(made, folder=str(tmp_path / "text" / "out")))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "torch sees no GPU" in refused(ConfigError, config(tmp_path, device="cuda"))
    (tmp_path / "text").write_bytes(b"")
    assert "it holds no text" in refused(DataError, made)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert "pipeline.ranks=2: each rank is one process and torchrun started 3" in refused(
        WorldSizeError, made
    )


def test_a_folder_with_weights_is_trained_on(tmp_path: Path) -> None:
    keys = {key: value for key, value in QWEN3.items() if key != "model_type"}
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **keys))
    model.save_pretrained(tmp_path / "model")
    made = config(tmp_path, steps=1)
    made = made.model_copy(
        update={"model": made.model.model_copy(update={"config": None, "path": str(tmp_path / "model")})}
    )
    prepared = preflight(made)
    run(prepared)
    ids = torch.cat([whole(batch)["input_ids"] for batch in prepared.data.held_out_batches(4)])
    model.eval()
    assert metrics(tmp_path)[0]["held_out_loss"] == pytest.approx(
        float(model(input_ids=ids, labels=ids).loss.detach())
    )


def test_a_checkpoint_has_the_tokenizer_that_the_run_read_with(tmp_path: Path) -> None:
    """0.4.0: beside it lay the vocabulary of the model that the run began from."""
    start = tmp_path / "start"
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**QWEN3)).save_pretrained(start)
    for name in ("merges.txt", "vocab.json", "chat_template.jinja"):
        (start / name).write_text("{}")
    (start / "preprocessor_config.json").write_text("{}")
    made = config(tmp_path, steps=1)
    run(preflight(made.model_copy(update={"model": ModelSection(path=str(start))})))
    left = tmp_path / "out" / "checkpoints" / "step-00000001"
    assert not [
        name for name in ("merges.txt", "vocab.json", "chat_template.jinja") if (left / name).exists()
    ]
    assert (left / "preprocessor_config.json").exists()
    assert AutoTokenizer.from_pretrained(left).encode("ab", add_special_tokens=False) == [97, 98]
    check_folder(left)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("first", "then"), [(1, 2), (2, 1)])
def test_a_run_goes_on_with_other_ranks(tmp_path: Path, tied: bool, first: int, then: int) -> None:
    """Not bit for bit, as the microbatches' sums may round differently, but from the same state."""
    model = {**QWEN3, "tie_word_embeddings": tied}

    def with_ranks(folder: Path, ranks: int) -> TrainConfig:
        folder.mkdir(exist_ok=True)
        made = config(folder, model, steps=4, checkpoint_every=2)
        return made.model_copy(update={"pipeline": made.pipeline.model_copy(update={"ranks": ranks})})

    run(preflight(with_ranks(tmp_path / "whole", first)))
    half = tmp_path / "whole" / "out" / "checkpoints" / "step-00000002"
    run(preflight(with_ranks(tmp_path / "then", then), str(half)))
    before = [row["loss"] for row in metrics(tmp_path / "whole") if row["step"] > 2 and "loss" in row]
    after = [row["loss"] for row in metrics(tmp_path / "then") if "loss" in row]
    assert after == pytest.approx(before, rel=1e-5)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_other_dtypes_and_recomputing_train_too(tmp_path: Path, dtype: str) -> None:
    made = config(tmp_path, activation_checkpointing=True, checkpoint_every=2)
    made = made.model_copy(update={"model": made.model.model_copy(update={"dtype": dtype})})
    run(preflight(made))
    rows = [row["held_out_loss"] for row in metrics(tmp_path) if "held_out_loss" in row]
    assert rows[-1] < rows[0]
    resumed = preflight(made, str(tmp_path / "out" / "checkpoints" / "step-00000002"))
    run(resumed)
    assert [row["held_out_loss"] for row in metrics(tmp_path) if "held_out_loss" in row] == rows
    saved = tensors(tmp_path / "out" / "checkpoints" / "step-00000004")
    weights = [value for name, value in saved.items() if name.startswith("model-")]
    assert {str(value.dtype) for value in weights} == {f"torch.{dtype}"}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("packing", ["none", "sequential", "best_fit"])
def test_packed_documents_are_trained_on_as_if_each_were_alone(
    tmp_path: Path, packing: str, attention: str
) -> None:
    made = with_documents(config(tmp_path, steps=3, evaluate_batches=100), tmp_path, packing=packing)
    made = made.model_copy(update={"model": made.model.model_copy(update={"attention": attention})})
    prepared = preflight(made)
    run(prepared)
    checkpoint = tmp_path / "out" / "checkpoints" / "step-00000003"
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    rows = prepared.data.held_out
    assert isinstance(rows, DocumentRows)
    chosen = len(rows) // 4 * 4  # whole batches
    total, tokens = 0.0, 0
    for row in np.linspace(0, len(rows) - 1, chosen).round().astype(int):
        for piece in rows.packing[row]:
            start, length = int(rows.pieces.starts[piece]), int(rows.pieces.lengths[piece])
            ids = torch.from_numpy(rows.tokens[None, start : start + length].astype(np.int64))
            total += float(model(input_ids=ids, labels=ids).loss.detach()) * (length - 1)
            tokens += length - 1
    held_out = [row for row in metrics(tmp_path) if "held_out_loss" in row][-1]
    assert held_out["tokens"] == tokens
    assert held_out["held_out_loss"] == pytest.approx(total / tokens, rel=1e-5)


def test_a_packed_run_goes_on_bit_for_bit_and_tells_its_padding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
        made = config(tmp_path / name, steps=4, checkpoint_every=2)
        made = with_documents(made, tmp_path / name, packing="sequential", shapes="padded")
        prepared = preflight(made)
        run(prepared)
    run(preflight(made, str(tmp_path / "parts" / "out" / "checkpoints" / "step-00000002")))
    whole, parts = (
        tensors(tmp_path / name / "out" / "checkpoints" / "step-00000004") for name in ("whole", "parts")
    )
    assert [name for name in whole if not torch.equal(whole[name], parts[name])] == []

    rows = [row for row in metrics(tmp_path / "whole") if "loss" in row]
    fills = [prepared.data.batch(step).fill for step in range(1, 5)]
    assert [row["padding"] for row in rows] == [fill.padding for fill in fills]
    assert any(row["padding"] > 0 for row in rows)
    assert all(row["tokens_per_second"] == pytest.approx(row["tokens"] / row["seconds"]) for row in rows)
    share = prepared.data.expected(4).padding
    note = f"padding {share:.1%} of the tokens (data.packing=sequential, pipeline.shapes=padded)"
    assert prepared.notes == (note,)
    said = capsys.readouterr().out
    assert f"padding     {share:.1%} of the tokens, over all steps" in said
    assert f"bubble {rows[0]['bubble']:.1%}  padding {rows[0]['padding']:.1%}" in said


def test_the_order_is_that_of_any_number_of_ranks(tmp_path: Path) -> None:
    losses = []
    for ranks in (1, 2):
        (tmp_path / str(ranks)).mkdir()
        made = config(tmp_path / str(ranks), steps=3)
        run(preflight(with_documents(made, tmp_path / str(ranks), ranks=ranks)))
        losses.append([row["loss"] for row in metrics(tmp_path / str(ranks)) if "loss" in row])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ({"model_type": "mamba"}, "its state runs over the whole row"),
        ({"model_type": "opt", "num_attention_heads": 2, "ffn_dim": 32}, "takes no notice of documents"),
    ],
)
def test_documents_are_not_packed_for_a_model_that_would_mix_them(
    tmp_path: Path, model: dict[str, Any], reason: str
) -> None:
    sizes = {"vocab_size": 256, "hidden_size": 16, "num_hidden_layers": 2}
    made = config(tmp_path, {**model, **sizes})
    for packing in ("sequential", "best_fit"):
        assert reason in refused(ModelError, with_documents(made, tmp_path, packing=packing))
    preflight(with_documents(made, tmp_path, packing="none"))
    preflight(config(tmp_path, {**model, **sizes}))


def test_padding_that_is_longer_than_the_model_takes_is_refused(tmp_path: Path) -> None:
    made = with_documents(config(tmp_path), tmp_path, shapes="padded", padding={"multiple": 65})
    assert "pipeline.padding, to 65 tokens a row: the model takes 64 positions" in refused(ConfigError, made)


def test_settings_reach_the_library(tmp_path: Path) -> None:
    limit = CheckpointingSection(every=2, save=("matmul",), memory_limit=2.0**30)
    made = config(tmp_path, batch_size=5, activation_checkpointing=limit)
    pipeline = {
        "shapes": "padded", "padding": {"multiple": 24}, "exchange": "batched", "transport": "gloo",
        "wire_dtype": "bfloat16",
    }  # fmt: skip
    auto = make_auto(with_documents(made, tmp_path, **pipeline))
    assert auto.shapes == Padding(multiple=24)
    assert (auto.transport, auto.exchange, auto.wire_dtype) == ("gloo", "batched", torch.bfloat16)
    # the larger of two microbatches has three rows of 16, which the pipeline pads
    limited = Checkpointing(every=2, save=("matmul",), memory_limit=2.0**30, shape=(3, 24))
    assert auto.activation_checkpointing == limited
    with pytest.raises(ConfigError, match="transport=local: it holds all ranks in one process"):
        make_auto(with_documents(made, tmp_path, transport="local"))
    plain = make_auto(config(tmp_path, activation_checkpointing="selective"))
    assert plain.activation_checkpointing == "selective"
    assert (plain.shapes, plain.transport, plain.exchange, plain.wire_dtype) == (
        "inferred", None, "channels", None
    )  # fmt: skip
    unlimited = make_auto(config(tmp_path, activation_checkpointing={"in_flight": [1, 0]}))
    assert unlimited.activation_checkpointing == Checkpointing(in_flight=(1, 0))


def test_a_checkpoint_older_than_a_key_meant_its_default(tmp_path: Path) -> None:
    run(preflight(config(tmp_path)))
    checkpoint = tmp_path / "out" / "checkpoints" / "step-00000004"
    state = json.loads((checkpoint / "state.json").read_text())
    del state["config"]["data"]["packing"], state["config"]["pipeline"]["shapes"]
    changed = [*changes(_with_defaults(state["config"]), config(tmp_path, steps=6).model_dump(mode="json"))]
    assert changed == ["train.steps=6 (was 4)"]
