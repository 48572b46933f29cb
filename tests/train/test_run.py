"""Whole runs in one process: what they leave, that they resume bit for bit, and what they refuse first."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.errors import (
    AlteredError,
    CheckpointError,
    ConfigError,
    RunError,
)
from penstock.train.checkpoints import NEWEST
from penstock.train.config.sections import TrainConfig
from penstock.train.preflight import Prepared, preflight

# the notes on data alone, for a checkpoint that does not say its data
from penstock.train.preflight import _data_notes as data_notes
from penstock.train.run import run
from support.covering import some
from support.folders import check_folder, flip
from support.refusals import refuses
from support.refused_runs import refused, with_documents
from support.tiny import (
    GPT2_WITH_DROPOUT,
    QWEN3,
    assert_same_tensors,
    checkpoint,
    config,
    metrics,
    save_model,
    tensors,
)

EXACT = ("step", "loss", "grad_norm", "learning_rate", "held_out_loss", "padding")


def folders(folder: Path, *names: str) -> list[Path]:
    for name in names:
        (folder / name).mkdir()
    return [folder / name for name in names]


def exact(folder: Path) -> list[list[Any]]:
    """The metrics that two equal runs have in common."""
    return [[row.get(key) for key in EXACT] for row in metrics(folder)]


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in metrics(folder) if "loss" in row]


def held_out(folder: Path) -> list[float]:
    return [row["held_out_loss"] for row in metrics(folder) if "held_out_loss" in row]


def resume_bit_for_bit(folder: Path, made: TrainConfig, resume: str) -> Prepared:
    """Run the end of a finished run again, and expect the same weights, state and metrics."""
    last, before = checkpoint(folder, made.train.last), folder / "before"
    shutil.copytree(last, before)
    rows = exact(folder)
    if resume == NEWEST:
        (last / "model.safetensors.index.json").write_text("torn")
        last.with_name(f".{last.name}.writing-abcd").mkdir()
    prepared = preflight(made, resume)
    run(prepared)
    assert_same_tensors(before, last)
    assert exact(folder) == rows
    return prepared


def test_an_evaluation_has_the_token_accuracy_of_transformers(tmp_path: Path) -> None:
    prepared = preflight(config(tmp_path, steps=8, accumulate=2, evaluate_every=8))
    run(prepared)
    model, hits, tokens = AutoModelForCausalLM.from_pretrained(checkpoint(tmp_path, 8)), 0, 0
    for batch in prepared.data.held_out_batches(prepared.config.train.evaluate_batches):
        assert isinstance(batch.content, dict)
        labels = batch.content["labels"][:, 1:]
        with torch.no_grad():
            likeliest = model(input_ids=batch.content["input_ids"]).logits[:, :-1].argmax(-1)
        hits, tokens = hits + int((likeliest == labels).sum()), tokens + int((labels != -100).sum())
    rows = metrics(tmp_path)
    assert hits > 0
    last = [row for row in rows if "held_out_loss" in row][-1]
    assert (last["held_out_token_accuracy"], last["tokens"]) == (pytest.approx(hits / tokens), tokens)
    assert all(0 <= row["token_accuracy"] <= 1 for row in rows if "loss" in row)


def test_a_run_leaves_checkpoints_metrics_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sampled = {"output.sample_prompt": "ABC", "output.sample_tokens": 3}
    run(preflight(config(tmp_path, keys=sampled, steps=5, checkpoint_every=3)))
    out, last = tmp_path / "out", checkpoint(tmp_path, 5)
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["step-00000003", "step-00000005"]
    check_folder(last)
    assert (out / "timeline.svg").read_text().lstrip().startswith("<")

    rows = metrics(tmp_path)
    assert [row["step"] for row in rows if "held_out_loss" in row] == [0, 2, 4, 5]
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5]
    keys = {"step", "loss", "learning_rate", "grad_norm", "tokens", "tokens_per_second", "bubble", "seconds"}
    keys |= {
        "padding",
        "rows",
        "epoch",
        "tflops_per_device",
        "peak_resident",
        "seconds_by_part",
        "run",
        "token_accuracy",
    }
    assert all(set(row) == keys and row["tokens"] == 4 * 15 for row in steps)
    assert all(row["padding"] == 0 for row in steps)
    assert held_out(tmp_path)[0] == pytest.approx(math.log(256), abs=0.3)
    assert held_out(tmp_path)[-1] < held_out(tmp_path)[0]

    tokenizer = AutoTokenizer.from_pretrained(last)
    ids = torch.tensor([tokenizer("ABCDEFGHIJ")["input_ids"]])
    assert ids.tolist() == [list(b"ABCDEFGHIJ")]
    model = AutoModelForCausalLM.from_pretrained(last)
    assert float(model(input_ids=ids, labels=ids).loss.detach()) < rows[0]["held_out_loss"]

    said = capsys.readouterr().out
    for part in (last, out / "metrics.jsonl", out / "timeline.svg", "predicted", "measured", "\nABC"):
        assert str(part) in said
    assert "step 1/5  loss" in said


def test_a_resumed_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    made = config(tmp_path, GPT2_WITH_DROPOUT, steps=6, checkpoint_every=2)
    run(preflight(made))
    resumed = resume_bit_for_bit(tmp_path, made, NEWEST)
    assert resumed.start.done == 4
    assert "passed over" in resumed.notes[0]
    assert "never finished" in resumed.notes[0]
    assert "model.safetensors.index.json" in resumed.notes[1]


@pytest.mark.fault("a checkpoint's files change", "a bit of a tensor and of state.json")
def test_a_run_resumes_from_the_newest_checkpoint_that_is_unaltered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """0.5.0 hashed whole folders on every rank, before the run, to find that one."""
    made = config(tmp_path, steps=4, checkpoint_every=1)
    run(preflight(made))
    shutil.move(checkpoint(tmp_path, 4), tmp_path / "before")
    flip(checkpoint(tmp_path, 3) / "optimizer-00001-of-00001.safetensors")
    flip(checkpoint(tmp_path, 2) / "state.json", 5)
    with refuses(AlteredError, "step-00000003: optimizer", "contents differ"):
        run(preflight(made, str(checkpoint(tmp_path, 3))))
    prepared = preflight(made, NEWEST)
    assert prepared.start.done == 3
    run(prepared)
    said = capsys.readouterr().out
    for step in (3, 2):
        assert f"passed over checkpoint {checkpoint(tmp_path, step)}: " in said
    assert f"going on from {checkpoint(tmp_path, 1)}" in said
    assert_same_tensors(tmp_path / "before", checkpoint(tmp_path, 4))


def test_both_copies_of_a_slice_in_one_process_get_their_state_back(tmp_path: Path) -> None:
    """0.2.0: a process with two copies of one slice gave its optimizer state to one of them only.

    A resumed run's copies drifted apart in silence: the state is looked up by name, and both have one name.
    """
    made = config(tmp_path, keys={"pipeline.schedule": "dualpipe"}, checkpoint_every=2)
    run(preflight(made))
    resume_bit_for_bit(tmp_path, made, str(checkpoint(tmp_path, 2)))


@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.sweep), True], ids=["untied", "tied"])
def test_a_run_goes_on_with_other_ranks(tmp_path: Path, tied: bool) -> None:
    """Not bit for bit, as the microbatches' sums may round differently, but from the same state."""
    found, resume = [], None
    for turn, ranks in enumerate((1, 2, 1)):  # each goes on from the step after which the one before began
        (folder,) = folders(tmp_path, str(turn))
        model = {**QWEN3, "tie_word_embeddings": tied}
        run(preflight(config(folder, model, {"pipeline.ranks": ranks}, steps=3, checkpoint_every=1), resume))
        resume = str(checkpoint(folder, turn + 1))
        found.append(losses(folder))
    assert [len(each) for each in found] == [3, 2, 1]
    assert found[1] == pytest.approx(found[0][1:], rel=1e-5)
    assert found[2] == pytest.approx(found[0][2:], rel=1e-5)


@pytest.mark.parametrize("dtype", some(["float64", "bfloat16"], "float64"))
def test_other_dtypes_and_recomputing_train_and_resume_too(tmp_path: Path, dtype: str) -> None:
    made = config(tmp_path, keys={"model.dtype": dtype}, activation_checkpointing=True, checkpoint_every=2)
    run(preflight(made))
    found = held_out(tmp_path)
    assert found[-1] < found[0]
    run(preflight(made, str(checkpoint(tmp_path, 2))))
    assert held_out(tmp_path) == found
    saved = tensors(checkpoint(tmp_path, 4))
    weights = [value for name, value in saved.items() if name.startswith("model-")]
    assert {str(value.dtype) for value in weights} == {f"torch.{dtype}"}


def test_a_folder_with_weights_is_trained(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", seed=1)
    keys = {"model.config": None, "model.path": str(tmp_path / "model")}
    prepared = preflight(config(tmp_path, keys=keys, steps=1))
    run(prepared)
    ids = torch.cat([batch.content["input_ids"] for batch in prepared.data.held_out_batches(4)])  # type: ignore[call-overload]
    model.eval()
    expected = float(model(input_ids=ids, labels=ids).loss.detach())
    assert held_out(tmp_path)[0] == pytest.approx(expected)


def test_a_checkpoint_has_the_tokenizer_of_the_run(tmp_path: Path) -> None:
    """0.4.0: it also held the vocabulary of the model that the run began from."""
    start = tmp_path / "start"
    save_model(start)
    replaced = ("merges.txt", "vocab.json", "chat_template.jinja")
    for name in (*replaced, "preprocessor_config.json"):
        (start / name).write_text("{}")
    run(preflight(config(tmp_path, keys={"model.config": None, "model.path": str(start)}, steps=1)))
    left = checkpoint(tmp_path, 1)
    assert not [name for name in replaced if (left / name).exists()]
    assert (left / "preprocessor_config.json").exists()
    assert AutoTokenizer.from_pretrained(left).encode("ab", add_special_tokens=False) == [97, 98]
    check_folder(left)


def test_resume_starts_from_the_beginning_where_there_is_nothing(tmp_path: Path) -> None:
    """0.5.0: it was refused, so that no one command went on after a kill in the first minute too."""
    made = config(tmp_path)
    for hidden in (False, True):
        if hidden:  # killed in the write of the first checkpoint
            checkpoint(tmp_path, 2).with_name(".step-00000002.writing-0a1b").mkdir(parents=True)
        prepared = preflight(made, NEWEST)
        assert (prepared.start.done, prepared.start.checkpoint) == (0, None)
        said = f"{tmp_path / 'out'} holds no checkpoint of its last run: starting from the beginning"
        assert prepared.notes[-1] == said
        assert len(prepared.notes) == 1 + hidden
    run(prepared)
    assert preflight(config(tmp_path, steps=9), NEWEST).start.done == 4


def test_what_cannot_be_resumed_is_refused(tmp_path: Path) -> None:
    made = config(tmp_path)
    run(preflight(made))
    assert "nothing is left to do" in refused(ConfigError, made, NEWEST)
    other = config(tmp_path, {**QWEN3, "intermediate_size": 64}, steps=9)
    assert "model config intermediate_size=32: the model has 64" in refused(CheckpointError, other, NEWEST)
    longer = config(tmp_path, steps=9)
    assert "no such folder" in refused(CheckpointError, longer, str(tmp_path / "nowhere"))
    (checkpoint(tmp_path, 4) / "optimizer-00001-of-00001.safetensors").write_bytes(b"x")
    assert "it has 1 bytes" in refused(CheckpointError, longer, str(checkpoint(tmp_path, 4)))
    said = refused(CheckpointError, longer, NEWEST)
    assert "passed over" in said
    assert "it has 1 bytes" in said


@pytest.mark.parametrize(
    ("step", "value", "model", "train"),
    [
        ("step 0", "held_out_loss=nan", {"rms_norm_eps": float("nan")}, {}),
        ("step 3", "grad_norm=nan", {}, {"clip_norm": None}),
    ],
)
def test_a_loss_that_is_not_finite_ends_the_run(
    tmp_path: Path, step: str, value: str, model: dict[str, Any], train: dict[str, Any]
) -> None:
    wild = config(tmp_path, {**QWEN3, **model}, {"optimizer.learning_rate": 1e30}, **train)
    with refuses(RunError, value, "finite numbers", "Lower optimizer.learning_rate") as caught:
        run(preflight(wild))
    assert caught.value.value.startswith(f"{step}: ")


# ---- Data that changes between a checkpoint and the run that goes on from it


def test_a_run_goes_on_with_other_data_where_its_config_says_so_and_else_not(tmp_path: Path) -> None:
    """0.5.0: bytes appended to a text changed all later batches, and a note said it: rows were drawn anew."""
    run(preflight(config(tmp_path, steps=4, checkpoint_every=2)))
    more = config(tmp_path, steps=6, checkpoint_every=2)  # which writes the text
    text = (tmp_path / "text").read_bytes()
    (tmp_path / "text").write_bytes(text + b"x" * 16)
    counts = f"{tmp_path / 'text'} has 776 tokens (was 760)"
    with refuses(CheckpointError, "the data of a resumed run", counts, "data.changed=accept"):
        preflight(more, NEWEST)
    with refuses(CheckpointError, "the data of a resumed run", counts):
        preflight(more, str(checkpoint(tmp_path, 2)))
    assert preflight(more).data.batch(1)  # a fresh start takes what is there
    (tmp_path / "text").write_bytes(text)
    assert not any("changed since then: the data" in note for note in preflight(more, NEWEST).notes)

    accepting = config(tmp_path, keys={"data.changed": "accept"}, steps=6, checkpoint_every=2)
    (tmp_path / "text").write_bytes(text + b"x" * 16)
    prepared = preflight(accepting, NEWEST)
    (note,) = (note for note in prepared.notes if note.startswith("changed since then: the data"))
    assert note.endswith("text has 776 tokens (was 760)")
    run(prepared)
    assert [row["step"] for row in metrics(tmp_path) if "loss" in row] == [1, 2, 3, 4, 5, 6]


def test_an_older_checkpoint_in_place_of_an_altered_one_is_of_this_data_too(tmp_path: Path) -> None:
    """And one that does not say its data, as those of versions up to 0.5.0, is gone on from with a note."""
    made = config(tmp_path, steps=4, checkpoint_every=2)
    run(preflight(made))
    prepared = preflight(config(tmp_path, steps=6, checkpoint_every=2), NEWEST)
    start = replace(prepared.start, state=prepared.start.state._replace(data=None))
    assert list(data_notes(made, prepared.data, start)) == [
        "the checkpoint does not say which data it is of, so penstock cannot check whether they changed"
    ]
    state = checkpoint(tmp_path, 2) / "state.json"
    written = json.loads(state.read_text())
    written["data"]["digest"] = "other"
    written["data"]["sources"][0] |= {"digest": "other", "tokens": 7}
    state.write_text(json.dumps(written))
    manifest = state.with_name("manifest.json")
    listed = json.loads(manifest.read_text())
    del listed["digest"]  # as of 0.5.0
    listed["files"]["state.json"] = {
        "size": state.stat().st_size,
        "sha256": hashlib.sha256(state.read_bytes()).hexdigest(),
    }
    manifest.write_text(json.dumps(listed))
    prepared = preflight(config(tmp_path, steps=6, checkpoint_every=2), NEWEST)
    flip(min(checkpoint(tmp_path, 4).glob("*.safetensors")))
    with refuses(CheckpointError, "the data of a resumed run", "760 tokens (was 7)"):
        run(prepared)


@pytest.mark.parametrize(
    ("packing", "attention"),
    [
        pytest.param("none", "sdpa", marks=pytest.mark.sweep),
        ("sequential", "eager"),
        ("best_fit", "sdpa"),
    ],
)
def test_packed_documents_are_trained_as_if_each_were_alone(
    tmp_path: Path, packing: str, attention: str
) -> None:
    keys = {"data.packing": packing, "model.attention": attention}
    prepared = preflight(with_documents(tmp_path, keys=keys, steps=3, evaluate_batches=100))
    run(prepared)
    model = AutoModelForCausalLM.from_pretrained(checkpoint(tmp_path, 3)).eval()
    rows = prepared.data.held_out
    chosen = len(rows) // 4 * 4  # whole batches
    total, tokens = 0.0, 0
    for row in np.linspace(0, len(rows) - 1, chosen).round().astype(int):
        for piece in rows.read(row):
            ids = torch.from_numpy(piece.ids[None])
            total += float(model(input_ids=ids, labels=ids).loss.detach()) * (len(piece.ids) - 1)
            tokens += len(piece.ids) - 1
    last = [row for row in metrics(tmp_path) if "held_out_loss" in row][-1]
    assert last["tokens"] == tokens
    assert last["held_out_loss"] == pytest.approx(total / tokens, rel=1e-5)


def test_a_packed_run_resumes_bit_for_bit_and_shows_its_padding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = {"data.packing": "sequential", "pipeline.shapes": "padded"}
    made = with_documents(tmp_path, keys=keys, checkpoint_every=2)
    prepared = preflight(made)
    run(prepared)
    resume_bit_for_bit(tmp_path, made, str(checkpoint(tmp_path, 2)))
    rows = [row for row in metrics(tmp_path) if "loss" in row]
    assert [row["padding"] for row in rows] == [prepared.data.batch(at).fill.padding for at in range(1, 5)]
    assert any(row["padding"] > 0 for row in rows)
    assert all(row["tokens_per_second"] == pytest.approx(row["tokens"] / row["seconds"]) for row in rows)
    share = prepared.data.expected(4).padding
    note = f"padding {share:.1%} of the tokens (data.packing=sequential, pipeline.shapes=padded)"
    assert prepared.notes == (note,)
    said = capsys.readouterr().out
    assert f"padding     {share:.1%} of the tokens, over all steps" in said
    assert f"bubble {rows[0]['bubble']:.1%}  padding {rows[0]['padding']:.1%}" in said


def test_any_number_of_ranks_has_the_same_order_of_documents(tmp_path: Path) -> None:
    made = [with_documents(tmp_path, keys={"pipeline.ranks": ranks}) for ranks in (1, 2)]
    one, two = (preflight(each).data.batch(3).content for each in made)
    assert isinstance(one, list)
    assert isinstance(two, list)
    for first, second in zip(one, two, strict=True):
        assert all(torch.equal(first[name], second[name]) for name in first)
