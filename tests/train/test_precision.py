"""train.precision and the optimizers of torch: a run is that of a loop by hand, and goes on from anywhere."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim import Adafactor, AdamW, Muon, Optimizer
from transformers import AutoModelForCausalLM

from penstock.cli.dry_run import memory
from penstock.errors import ConfigError, UnfitError
from penstock.train.checkpoints import NEWEST
from penstock.train.config.load import load_config
from penstock.train.config.sections import TrainConfig
from penstock.train.preflight import dry_run, preflight
from penstock.train.run import run
from support.covering import every
from support.refusals import refuses
from support.tiny import (
    assert_same_tensors,
    checkpoint,
    config,
    config_file,
    held_out_losses,
    metrics,
    tensors,
)
from support.twin import DECAY, OPTIONS, RATE, Make, by_hand, decayed, largest_difference, made


def adamw(named: Any) -> list[Optimizer]:
    return [AdamW(decayed(named), fused=True, **OPTIONS)]


def adafactor(named: Any) -> list[Optimizer]:
    return [Adafactor([p for _, p in named], lr=RATE)]


def muon(named: Any) -> list[Optimizer]:
    """torch's own, of the matrices in layers."""
    hidden = [p for name, p in named if "layers" in name and p.ndim > 1]
    rest = [(name, p) for name, p in named if not ("layers" in name and p.ndim > 1)]
    return [Muon(hidden, lr=RATE, weight_decay=DECAY), *adamw(rest)]


MUON = {"name": "muon", "adamw": {"learning_rate": RATE}}
TWINS: list[tuple[str, str, dict[str, Any], dict[str, Any], Make, float]] = [
    ("mixed", "zb_h1", {}, {}, adamw, 0.0),
    ("mixed", "1f1b", {"tie_word_embeddings": True}, {}, adamw, 1e-4),
    ("bfloat16", "1f1b", {}, {}, adamw, 0.0),
    ("float32", "1f1b", {}, {"name": "adafactor"}, adafactor, 1e-5),
    ("mixed", "1f1b", {}, MUON, muon, 1e-2),  # it rounds to bfloat16 itself
]


@pytest.mark.parametrize(
    ("precision", "schedule", "model", "optimizer", "make", "tolerance"), every(2, TWINS)
)
def test_a_run_is_the_loop_that_one_writes_by_hand(
    tmp_path: Path,
    precision: str,
    schedule: str,
    model: dict[str, Any],
    optimizer: dict[str, Any],
    make: Make,
    tolerance: float,
) -> None:
    """Losses and weights, over two ranks, with clipping."""
    keys = made(tmp_path, precision, optimizer, model=model, **{"pipeline.schedule": schedule})
    run(preflight(keys))
    losses, trained = by_hand(keys, make)
    rows = [row for row in metrics(tmp_path) if "loss" in row]
    assert all(row["grad_norm"] > 0.5 for row in rows), "nothing was clipped"
    assert [row["loss"] for row in rows] == pytest.approx(losses, rel=max(tolerance, 1e-6))
    saved = weights(checkpoint(tmp_path, 4))
    assert {value.dtype for value in saved.values()} == {trained.dtype}
    assert largest_difference(saved, trained) <= tolerance


def weights(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("model*.safetensors"))
    return {name: value for file in files for name, value in load_file(file).items()}


def test_a_mixed_run_goes_on_bit_for_bit_and_at_another_size(tmp_path: Path) -> None:
    """Its checkpoints hold the float32 weights, and open with transformers as such."""
    keys = config(tmp_path, keys={"train.precision": "mixed", "train.check": "always"}, checkpoint_every=2)
    run(preflight(keys))
    rows = metrics(tmp_path)
    last, before = checkpoint(tmp_path, 4), tmp_path / "before"
    last.rename(before)
    run(preflight(keys, NEWEST))
    assert_same_tensors(before, last)
    assert {value.dtype for value in tensors(last).values() if value.ndim > 1} == {torch.float32}
    assert AutoModelForCausalLM.from_pretrained(last).dtype == torch.float32
    other = config(
        tmp_path, keys={"train.precision": "mixed", "pipeline.ranks": 1, "output.folder": str(tmp_path / "1")}
    )
    run(preflight(other, str(checkpoint(tmp_path, 2))))
    found = load_rows(tmp_path / "1")
    assert found == pytest.approx(
        [row["loss"] for row in rows if row.get("loss") and row["step"] > 2], rel=1e-5
    )


def load_rows(output: Path) -> list[float]:
    lines = (output / "metrics.jsonl").read_text().splitlines()
    return [row["loss"] for row in map(json.loads, lines) if "loss" in row]


@pytest.mark.parametrize(
    ("before", "after"), every(2, [("float32", "bfloat16"), ("mixed", "float32"), ("bfloat16", "mixed")])
)
def test_a_run_may_go_on_in_another_precision(tmp_path: Path, before: str, after: str) -> None:
    """Weights and states are converted, and the run says what has changed."""
    run(preflight(config(tmp_path, keys={"train.precision": before}, steps=2)))
    keys = config(tmp_path, keys={"train.precision": after}, steps=3)
    prepared = preflight(keys, NEWEST)
    assert f"changed since then: train.precision={after} (was {before})" in prepared.start.notes
    run(prepared)
    dtype = torch.bfloat16 if after == "bfloat16" else torch.float32
    found = tensors(checkpoint(tmp_path, 3)).items()
    assert {value.dtype for name, value in found if value.ndim > 1} == {dtype}
    assert math.isfinite(held_out_losses(tmp_path)[-1])


REFUSED = [
    (
        "train.precision=mixed; model.dtype=bfloat16",
        "config",
        "mixed keeps weights in float32",
        "Leave model.dtype out",
    ),
    (
        "train.precision=bfloat16; model.dtype=float32",
        "config",
        "bfloat16 keeps weights in bfloat16",
        "Leave model.dtype out",
    ),
    (
        "train.precision=mixed; parallel.dp_shard=2; parallel.param_dtype=bfloat16",
        "config",
        "two ways to compute",
        "Leave param_dtype out",
    ),
    ("train.precision=fp16", "train.precision='fp16'", "'float32', 'bfloat16' or 'mixed'", ""),
    ("train.bf16=true", "train.bf16=True", "no such key", "Write train.precision=mixed, or bfloat16"),
    (
        "optimizer.stochastic_rounding=true",
        "config",
        "optimizer.stochastic_rounding=true: it rounds",
        "",
    ),
    (
        "train.precision=mixed; optimizer.stochastic_rounding=true",
        "config",
        "no step is lost",
        "Set train.precision=bfloat16",
    ),
    (
        "optimizer.name=adafactor; parallel.dp_shard=2",
        "config",
        "optimizer.name=adafactor on dp_shard=2",
        "",
    ),
    ("optimizer.states=8bit; parallel.tp=2", "config", "optimizer.states=8bit on tp=2", ""),
    (
        "optimizer.name=muon; optimizer.adamw.states=4bit; parallel.cp=2",
        "config",
        "optimizer.adamw.states=4bit on cp=2",
        "",
    ),
    ("optimizer.states=fp8; model.dtype=float64", "config", "torchao computes in float32", "Leave it out"),
    ("optimizer.name=adafactor; optimizer.betas=[0.9, 0.9]", "optimizer", "betas are AdamW's", ""),
]


@pytest.mark.parametrize(("overrides", "value", "rule", "remedy"), REFUSED)
def test_what_does_not_fit_is_refused_with_its_remedy(
    tmp_path: Path, overrides: str, value: str, rule: str, remedy: str
) -> None:
    with refuses(ConfigError, value, rule, remedy):
        load_config(config_file(tmp_path), overrides.split("; "))


def test_torchao_is_asked_for_before_any_weight_is_loaded(tmp_path: Path) -> None:
    """A dry run goes on, and says so."""
    keys = config(tmp_path, keys={"optimizer": {"states": "8bit"}})
    with refuses(ConfigError, "optimizer.states=8bit", "needs torchao", "pip install"):
        preflight(keys)
    assert any("optimizer.states=8bit: not checked" in note for note in dry_run(keys).notes)


def test_state_of_other_moments_is_refused_by_name(tmp_path: Path) -> None:
    run(preflight(config(tmp_path, steps=2)))
    keys = config(tmp_path, keys={"optimizer": {"name": "adafactor"}}, steps=3)
    with refuses(UnfitError, "was trained by AdamW", "Adafactor trains it"):
        preflight(keys, NEWEST)


def test_the_old_key_is_taken_with_a_warning_that_names_the_new_one(tmp_path: Path) -> None:
    keys = config(tmp_path, keys={"parallel": {"dp_shard": 2, "param_dtype": "bfloat16"}})
    (note,) = (note for note in dry_run(keys).notes if "param_dtype" in note)
    assert "deprecated: write train.precision=mixed" in note


def test_the_precision_says_the_dtype_of_the_weights(tmp_path: Path) -> None:
    """A checkpoint keeps the resolved config, which is valid again."""
    for precision, dtype in (("bfloat16", "bfloat16"), ("mixed", "float32"), (None, "float32")):
        keys = config(tmp_path, keys={"train.precision": precision})
        assert (keys.model.dtype, keys.computed) == (dtype, "bfloat16" if precision else "float32")
        assert TrainConfig.model_validate(keys.model_dump(mode="json")) == keys


@pytest.mark.parametrize(("optimizer", "kept"), [({}, 8), ({"states": "bfloat16"}, 4), (MUON, 0)])
def test_a_dry_run_counts_what_is_kept(tmp_path: Path, optimizer: dict[str, Any], kept: int) -> None:
    """Bytes by parameter; of Muon's matrices half of AdamW's."""
    planned = dry_run(config(tmp_path, keys={"train.precision": "mixed", "optimizer": optimizer}))
    model, found = planned.plan.source.model, memory(planned)
    parameters = sum(p.numel() for p in model.parameters())
    if kept:
        assert sum(each.optimizer for each in found) == kept * parameters
    assert sum(each.weights for each in found) == 4 * parameters
    matrices = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    assert sum(each.casts for each in found) == 2 * matrices
    assert all(each.activations for each in found)
