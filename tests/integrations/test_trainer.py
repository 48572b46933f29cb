"""PipelineTrainer against transformers' Trainer in one process: logs, callbacks, weights, files."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from penstock import Axes
from penstock.errors import CheckpointError
from penstock.integrations import PipelineTrainer
from support import trainers
from support.covering import some
from support.pool import Pool
from support.refusals import refuses
from support.trainers import Seen

# models are in float64, and transformers' loss in float32: a step moves weights by the learning rate, 1e-2
ROUNDING, OF_WEIGHTS = 1e-6, 1e-6  # relative, of what is logged; absolute, of the last weights
HELPERS = (
    "_scalar",
    "_finish_folder",
    "_write_tokenizer",
    "_export_callbacks",
    "_write_trainer_files",
)  # our own
STOPPING = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "learning_rate": 0.3}
DATA_PARALLEL = (Axes(dp_replicate=2), Axes(dp_shard=2))


def assert_alike(expected: Seen, *ranks: Seen) -> None:
    """All ranks have logged and called what the plain trainer has, and together they have its weights."""
    for rank in ranks:
        assert rank.events == expected.events
        assert [sorted(entry) for entry in rank.logs] == [sorted(entry) for entry in expected.logs]
        for ours, theirs in zip(rank.logs, expected.logs, strict=True):
            assert ours == pytest.approx(theirs, rel=ROUNDING)
        assert (rank.step, rank.best) == (expected.step, expected.best)
        assert rank.logs == ranks[0].logs
    weights: dict[str, Tensor] = {}
    for rank in ranks:
        weights |= rank.weights
    assert weights.keys() == expected.weights.keys()
    for name, value in expected.weights.items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=OF_WEIGHTS)


def assert_trained(expected: Seen) -> None:
    """The plain run has what the comparison is about: steps, clipping and evaluations."""
    norms = [entry["grad_norm"] for entry in expected.logs if "grad_norm" in entry]
    assert len(norms) == expected.step
    assert min(norms) > 0.5  # so that clipping has scaled each gradient
    assert any("eval_loss" in entry for entry in expected.logs)


@pytest.mark.parametrize("accumulation", some([1, 2], 2), ids=["one batch a step", "two batches a step"])
def test_trains_as_the_plain_trainer(tmp_path: Path, accumulation: int) -> None:
    sizes: dict[str, Any] = {
        "gradient_accumulation_steps": accumulation,
        "per_device_train_batch_size": 4 // accumulation,
    }
    expected = trainers.plain(tmp_path / "plain", **sizes)
    assert_trained(expected)
    assert_alike(expected, trainers.train(tmp_path / "pipeline", **sizes))


def test_two_ranks_train_as_the_plain_trainer(pool: Pool, tmp_path: Path) -> None:
    expected = trainers.plain(tmp_path / "plain")
    assert_alike(expected, *pool.run(2, trainers.train, tmp_path / "pipeline"))


@pytest.mark.parametrize(
    "axes",
    [pytest.param(DATA_PARALLEL[0], marks=pytest.mark.sweep), DATA_PARALLEL[1]],
    ids=["dp_replicate", "dp_shard"],
)
def test_data_parallel_ranks_share_the_rows(pool: Pool, tmp_path: Path, axes: Axes) -> None:
    """Two parts of 2 rows are a batch of 4 in one process; 11 rows leave a last batch of 3."""
    expected = trainers.plain(tmp_path / "plain")
    halved = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2}
    ranks = pool.run(4, _train, tmp_path / "pipeline", axes, halved)
    assert_alike(expected, *ranks)


def _train(folder: Path, axes: Axes, more: dict[str, Any]) -> Seen:
    return trainers.train(folder, axes, **more)


def test_stops_early_with_the_best_weights(pool: Pool, tmp_path: Path) -> None:
    """At a rate of 0.3 the loss rises from the first evaluation on."""
    more: dict[str, Any] = {**STOPPING, "num_train_epochs": 4}
    expected = trainers.plain(tmp_path / "plain", {"stopping": True}, **more)
    assert expected.step < 12
    assert expected.best is not None
    assert expected.best != f"checkpoint-{expected.step}"
    ranks = pool.run(2, _stop, tmp_path / "pipeline", more)
    assert_alike(expected, *ranks)
    states = [_callbacks(tmp_path / name / f"checkpoint-{expected.step}") for name in ("plain", "pipeline")]
    assert states[0] == states[1]
    assert states[0]["EarlyStoppingCallback"]["attributes"]["early_stopping_patience_counter"] == 1


def _callbacks(checkpoint: Path) -> Any:
    return json.loads((checkpoint / "trainer_state.json").read_text())["stateful_callbacks"]


def _stop(folder: Path, more: dict[str, Any]) -> Seen:
    return trainers.train(folder, given={"stopping": True}, **more)


@pytest.mark.parametrize(
    "step", [2, pytest.param(3, marks=pytest.mark.sweep)], ids=["mid-epoch", "end of epoch"]
)
def test_resumes_bit_for_bit(pool: Pool, tmp_path: Path, step: int) -> None:
    """With dropout and draws of each rank, so that the random states count."""
    whole = pool.run(2, _resume, tmp_path, None)
    resumed = pool.run(2, _resume, tmp_path, step)
    for (ours, our_draws), (theirs, their_draws) in zip(resumed, whole, strict=True):
        assert ours.logs[:-1] == theirs.logs[:-1]  # the last entry has the mean of the steps since the start
        assert ours.step == theirs.step
        assert all(torch.equal(value, theirs.weights[name]) for name, value in ours.weights.items())
        assert our_draws == {at: drawn for at, drawn in their_draws.items() if at > step}
    assert whole[0][1] != whole[1][1]


def _resume(folder: Path, step: int | None) -> tuple[Seen, dict[int, float]]:
    drawing = trainers.Drawing(dist.get_rank())
    resume = f"checkpoint-{step}" if step else None
    built: dict[str, Any] = {"dropout": 0.1}
    return trainers.train(folder, None, {"more": [drawing]}, built, resume, save_steps=1), drawing.drawn


def test_metrics_of_the_logits(pool: Pool, tmp_path: Path) -> None:
    expected = trainers.plain(tmp_path / "plain", {"metrics": True})
    assert any("eval_accuracy" in entry for entry in expected.logs)
    assert_alike(expected, *pool.run(2, _measure, tmp_path / "pipeline"))


def _measure(folder: Path) -> Seen:
    return trainers.train(folder, given={"metrics": True})


def test_saves_a_folder_of_transformers(pool: Pool, tmp_path: Path) -> None:
    """Into a folder with a plain model's weights, which must not win over the new ones."""
    trainers.model().save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").is_file()
    weights: dict[str, Tensor] = {}
    for of_rank in pool.run(2, _save, tmp_path):
        weights |= of_rank
    for folder in (tmp_path, tmp_path / "checkpoint-1"):
        saved = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
        assert saved.keys() == weights.keys()
        assert all(torch.equal(saved[name], value) for name, value in weights.items())
        assert (folder / "training_args.bin").is_file()


def _save(folder: Path) -> dict[str, Tensor]:
    with trainers.as_launched():
        pipe = trainers.pipeline()
        args = trainers.arguments(folder, max_steps=1, save_steps=1, warmup_steps=0)
        trainer = PipelineTrainer(pipe, args, **trainers.options())
        trainer.train()
        trainer.save_model()
        weights = {name: value.detach().clone() for name, value in pipe.owned_parameters()}
        pipe.close()
        return weights


def test_a_plain_trainers_checkpoint_is_refused(tmp_path: Path) -> None:
    trainers.plain(tmp_path)
    with refuses(CheckpointError, "checkpoint-2", "cannot be read"):
        trainers.train(tmp_path, resume="checkpoint-2")


def test_what_it_replaces_is_still_there() -> None:
    """A new version of transformers may call another method, and ours would be skipped."""
    for name, ours in vars(PipelineTrainer).items():
        if callable(ours) and name not in HELPERS:
            theirs = inspect.signature(getattr(Trainer, name)).parameters
            if name != "__init__":
                assert list(inspect.signature(ours).parameters) == list(theirs), name


def test_arguments_stay_the_users(tmp_path: Path) -> None:
    with trainers.as_launched():
        args = trainers.arguments(tmp_path)
        before = args.to_dict()
        trainer = PipelineTrainer(trainers.pipeline(), args, **trainers.options())
        assert args.to_dict() == before
        assert isinstance(trainer.args, TrainingArguments)


def test_without_accelerate_the_error_names_it() -> None:
    code = (
        "import sys; sys.modules['accelerate'] = None; import importlib.util as util\n"
        "spec = util.find_spec; util.find_spec = lambda n, *a: None if n == 'accelerate' else spec(n, *a)\n"
        "import penstock.integrations as i\n"
        "try: i.PipelineTrainer\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.startswith("ConfigError PipelineTrainer: it needs accelerate")
    assert "penstock[trainer]" in printed
