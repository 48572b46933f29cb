"""Distillation in the trainer: TRL's divergence from a teacher over the same ranks; what is refused."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from penstock.cli.dry_run import memory, show
from penstock.errors import ConfigError, ModelError
from penstock.train.config.sections import TrainConfig
from penstock.train.encoding.tokenizer import HuggingFace
from penstock.train.preflight import dry_run, preflight
from penstock.train.run import run
from support.covering import some
from support.pool import Pool
from support.refusals import refuses
from support.same_runs import resumes_bit_for_bit, trains_as_alone
from support.tiny import QWEN3, checkpoint, config, metrics, save_model, tensors

WIDE = {"vocab_size": 258, "hidden_size": 32, "num_hidden_layers": 4}


def with_teacher(
    folder: Path, keys: dict[str, Any] | None = None, loss: dict[str, Any] | None = None, **train: Any
) -> TrainConfig:
    """A run over prompts and completions, and a wider and deeper teacher."""
    (folder / "out").mkdir(exist_ok=True)
    if not (folder / "teacher").exists():
        save_model(folder / "teacher", seed=1, initializer_range=0.3, **WIDE)
        save_model(folder / "student", vocab_size=258)
    rows = [{"prompt": "q" * (1 + at % 5), "completion": "abc"[at % 3] * (2 + at % 7)} for at in range(40)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    keys = {"model": {"path": str(folder / "student")}, "data.path": str(folder / "rows.jsonl"),
            "data.kind": "chat", "data.held_out": 0.2, "data.sequence_length": 32} | (keys or {})  # fmt: skip
    section = {"kind": "distillation", "teacher": str(folder / "teacher"), **(loss or {})}
    return config(folder, QWEN3, keys, **{"loss": section, **train})


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed")
@pytest.mark.parametrize(
    ("divergence", "keys"),
    [
        pytest.param("forward", {}, marks=pytest.mark.sweep),
        ("reverse", {"train.accumulate": 2}),
        ("forward", {"pipeline.schedule": "zb_v", "train.batch_size": 5}),
        ("reverse", {"data.packing": "best_fit"}),
    ],
)
def test_three_steps_give_the_weights_of_trls_divergence_in_one_process(
    divergence: Any, keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")  # else the import is a warning, and so an error
    from trl.experimental.gkd import GKDTrainer

    settings = {"learning_rate": 0.02, "schedule": "constant", "weight_decay": 0.0, "eps": 1e-3,
                "betas": (0.9, 0.999)}  # fmt: skip
    if "pipeline.schedule" in keys:  # two stages on each rank
        keys = keys | {"model": {"config": {**QWEN3, "vocab_size": 258, "num_hidden_layers": 4}}}
    loss = {"divergence": divergence, "temperature": 2.0, "mix": 0.25}
    made = with_teacher(
        tmp_path, {"optimizer": settings} | keys, loss, steps=3, clip_norm=None, check="always"
    )
    prepared = preflight(made)
    batches: list[Any] = [prepared.data.batch(step).content for step in (1, 2, 3)]
    built = prepared.auto.build(prepared.model)
    whole = AutoModelForCausalLM.from_config(prepared.plan.source.model.config)
    whole.load_state_dict(dict(built.named_parameters()))
    built.close()
    teacher = AutoModelForCausalLM.from_pretrained(tmp_path / "teacher")
    run(prepared)
    optimizer, losses = torch.optim.AdamW(whole.parameters(), 0.02, eps=1e-3, weight_decay=0.0), []
    for batch in batches:
        count = sum(int((part["labels"][:, 1:] != -100).sum()) for part in batch)
        optimizer.zero_grad()
        total = 0.0
        for part in batch:
            inputs = {name: value for name, value in part.items() if name != "labels"} | {"use_cache": False}
            labels, student = part["labels"][:, 1:], whole(**inputs).logits[:, :-1]
            with torch.no_grad():
                taught = teacher(**inputs).logits[:, :-1]
            apart = GKDTrainer.generalized_jsd_loss(
                student,
                taught,
                labels,
                beta=float(divergence == "reverse"),
                temperature=2.0,
                num_items_in_batch=count,
            )
            entropy = F.cross_entropy(student.flatten(0, 1), labels.flatten(), reduction="sum") / count
            (0.75 * apart + 0.25 * entropy).backward()
            total += float((0.75 * apart + 0.25 * entropy).detach())
        losses.append(total)
        optimizer.step()
    assert [row["loss"] for row in metrics(tmp_path) if "loss" in row] == pytest.approx(losses, rel=1e-5)
    saved = {name.split()[1]: value for name, value in tensors(checkpoint(tmp_path, 3)).items()}
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(saved[name], parameter.detach(), rtol=1e-4, atol=1e-5)


def test_a_run_approaches_its_teacher_and_resumes_bit_for_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = with_teacher(tmp_path, steps=4, checkpoint_every=2, check="always")
    run(preflight(made))
    assert "checked in" in capsys.readouterr().out
    rows = metrics(tmp_path)
    held_out = [row["held_out_loss"] for row in rows if "held_out_loss" in row]
    assert held_out[-1] < held_out[0]
    assert not {"perplexity", "held_out_token_accuracy"} & rows[0].keys()
    resumes_bit_for_bit(tmp_path, made)


def flops(model: Any, rows: list[Any], *, backward: bool) -> int:
    """Counted by torch, row by row and without padding."""
    with FlopCounterMode(display=False) as counter:
        for row in rows:
            loss = model(input_ids=row[None], labels=row[None], use_cache=False).loss
            if backward:
                loss.backward()
    return int(counter.get_total_flops())


def test_the_teachers_forward_counts_in_a_rows_use_of_the_devices(tmp_path: Path) -> None:
    prepared = preflight(
        with_teacher(tmp_path, {"model": {"path": str(tmp_path / "student"), "attention": "eager"}}, steps=1)
    )
    batch: Any = prepared.data.batch(1).content
    whole = [(ids, labels) for part in batch for ids, labels in zip(*part.values(), strict=True)]
    rows = [ids[: int((labels != -100).nonzero().max()) + 1] for ids, labels in whole]
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name, attn_implementation="eager")
        for name in ("student", "teacher")
    )
    run(prepared)
    (step,) = [row for row in metrics(tmp_path) if "loss" in row]
    counted = flops(student, rows, backward=True) + flops(teacher, rows, backward=False)
    assert step["tflops_per_device"] * 1e12 * step["seconds"] == pytest.approx(counted, rel=1e-6)


def test_a_dry_run_counts_the_teachers_weights_and_forward(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, taught = (dry_run(with_teacher(tmp_path, train)) for train in ({"train.loss": None}, {}))
    teacher = taught.teacher
    assert plain.teacher is None
    assert teacher is not None
    for alone, both, stage in zip(memory(plain), memory(taught), teacher.stages, strict=True):
        assert both.weights - alone.weights == stage.parameter_bytes
        assert (both.gradients, both.optimizer) == (alone.gradients, alone.optimizer)
    show(with_teacher(tmp_path), None, None)
    shown = " ".join(capsys.readouterr().out.split())
    parameters = sum(p.numel() for p in teacher.source.model.parameters())
    assert f"teacher Qwen3ForCausalLM, 4 layers, {parameters:,} parameters: its forward takes" in shown
    elsewhere = with_teacher(tmp_path, loss={"teacher": str(tmp_path / "elsewhere")})
    assert any("teacher: not on this machine" in note for note in dry_run(elsewhere).notes)


def test_a_model_has_nothing_to_learn_from_itself(tmp_path: Path) -> None:
    made = with_teacher(tmp_path)
    assert made.train.loss is not None
    run(preflight(with_teacher(tmp_path, loss={"teacher": str(tmp_path / "student")}, steps=1)))
    (step,) = [row for row in metrics(tmp_path) if "loss" in row]
    assert step["loss"] == pytest.approx(0, abs=1e-7)
    assert step["grad_norm"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("axis", some(["dp_replicate", "dp_shard"], "dp_shard"))
def test_a_mesh_trains_as_one_pipeline_does(axis: str, pool: Pool, tmp_path: Path) -> None:
    keys = {"train.batch_size": 7, f"parallel.{axis}": 2, "train.check": "always"}
    made = with_teacher(tmp_path, keys)
    trains_as_alone(pool, tmp_path, made, (), axis=f"parallel.{axis}")


def test_another_vocabulary_or_tokenizer_is_refused(tmp_path: Path) -> None:
    made = with_teacher(tmp_path)
    save_model(tmp_path / "larger", **{**WIDE, "vocab_size": 300})
    with refuses(
        ConfigError, f"train.loss.teacher={tmp_path}/larger", "its vocab_size is 300, and the model's 258"
    ):
        preflight(with_teacher(tmp_path, loss={"teacher": str(tmp_path / "larger")}))
    other = HuggingFace("bytes").own
    other.save_pretrained(tmp_path / "teacher")
    preflight(made)
    vocabulary = json.loads((tmp_path / "teacher" / "tokenizer.json").read_text())
    first, second, *_ = vocabulary["model"]["vocab"]
    ids = vocabulary["model"]["vocab"]
    ids[first], ids[second] = ids[second], ids[first]
    (tmp_path / "teacher" / "tokenizer.json").write_text(json.dumps(vocabulary))
    with refuses(ConfigError, "train.loss.teacher=", "its tokenizer is another one, in 2 tokens"):
        preflight(made)


def test_a_teacher_without_weights_is_refused(tmp_path: Path) -> None:
    made = with_teacher(tmp_path)
    (tmp_path / "teacher" / "model.safetensors").unlink()
    with refuses(ConfigError, "train.loss.teacher=", "has no weights"):
        preflight(made)
    with pytest.raises(ModelError):
        preflight(with_teacher(tmp_path, loss={"teacher": str(tmp_path / "nowhere")}))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"pipeline.shapes": "padded"}, "pipeline.shapes=padded is not for train.loss=distillation"),
        ({"parallel.tp": 2}, "parallel.tp=2 is not for train.loss=distillation"),
        ({"data.kind": "preference"}, "data.kind=preference has none; leave train.loss out"),
        ({"train.z_loss": 0.1}, "train.z_loss=0.1 is not for train.loss=distillation"),
        ({"train.loss": {"kind": "distillation"}}, "teacher"),
    ],
)
def test_settings_without_a_teacher_are_refused(keys: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        with_teacher(tmp_path, keys)
