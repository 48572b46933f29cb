"""AutoPipeline: a model, unchanged, or a folder becomes a pipeline."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from penstock import AutoPipeline, Axes
from penstock.errors import AlteredError
from penstock.models.weights import folder
from penstock.models.weights.folder import MANIFEST, sha256_of
from support.covering import every
from support.families import pipeline, ragged_batch, tiny_config, tiny_model
from support.folders import flip
from support.pool import Pool
from support.reference import plain_step
from support.refusals import refuses


def test_the_four_lines(tmp_path: Path) -> None:
    """Training in a pipeline gives the weights that training in one process gives."""
    model, reference = tiny_model("qwen3", torch.float64), tiny_model("qwen3", torch.float64)
    pipe = AutoPipeline(ranks=4, schedule="1f1b", microbatches=8).build(model)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    plain = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    for step in range(3):
        batch = ragged_batch(8, 10 + step)
        loss, gradients = plain_step(reference, batch)
        for name, parameter in reference.named_parameters():
            parameter.grad = gradients[name]
        expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        plain.step()

        result = pipe.step(batch)
        assert pipe.clip_grad_norm_(0.5) == pytest.approx(float(expected), rel=1e-9)
        optimizer.step()
        optimizer.zero_grad()
        assert result.loss == pytest.approx(loss, rel=1e-9)
        assert result.tokens == int((batch["labels"][:, 1:] != -100).sum())
    for name, parameter in pipe.named_parameters(remove_duplicate=False):
        torch.testing.assert_close(parameter, reference.get_parameter(name), rtol=1e-7, atol=1e-9)
    pipe.save_pretrained(tmp_path / "model")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    torch.testing.assert_close(saved(batch["input_ids"]).logits, reference(batch["input_ids"]).logits)


def test_a_saved_folder_that_was_altered_is_refused(tmp_path: Path) -> None:
    """A flipped bit would load without a word."""
    pipe = AutoPipeline(ranks=2, microbatches=2).build(tiny_config("llama"))
    pipe.save_pretrained(tmp_path / "model")
    AutoPipeline(ranks=3, microbatches=2).build(tmp_path / "model")
    shard = tmp_path / "model" / "model-00002-of-00002.safetensors"
    flip(shard, -50)
    with refuses(AlteredError, shard.name, "contents differ"):
        AutoPipeline(ranks=3, microbatches=2).build(tmp_path / "model")


def hashed(path: Path, ranks: int) -> tuple[list[str], str]:
    """The files that this rank hashes as it builds, and its error."""
    names: list[str] = []

    def noted(file: Path, piece: int | None, stopped: Callable[[], bool]) -> str:
        names.append(file.name)
        return sha256_of(file, piece, stopped)

    replicas = dist.get_world_size() // ranks
    axes = Axes(dp_shard=replicas) if replicas > 1 else None
    with patch.object(folder, "sha256_of", noted):
        try:
            AutoPipeline(ranks=ranks, microbatches=2, timeout=30, axes=axes).build(path).close()
        except AlteredError as error:
            return names, str(error)
    return names, ""


@pytest.mark.parametrize("processes", every(2, [2, 4]))
def test_each_file_is_hashed_once_a_job(pool: Pool, tmp_path: Path, processes: int) -> None:
    """0.5.0: every rank read the whole model to hash it. What one finds altered ends all."""
    path = tmp_path / "model"
    AutoPipeline(ranks=2, microbatches=2).build(tiny_config("llama")).save_pretrained(path, "20KB")
    listed = json.loads((path / MANIFEST).read_text())["files"]
    found = pool.run(processes, hashed, path, 2)
    assert sorted(name for names, _ in found for name in names) == sorted(listed)
    assert all(any(name.startswith("model-") for name in names) and not error for names, error in found)
    (path / "config.json").write_text((path / "config.json").read_text().replace("silu", "gelu", 1))
    (error, *others) = [error for _, error in pool.run(processes, hashed, path, 2)]
    assert "config.json, on process" in error
    assert "its contents differ from what was written" in error
    assert others == [error] * (processes - 1)


def test_the_model_stays_as_it_was() -> None:
    model = tiny_model("gemma3_text", tied=True)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    pipe = pipeline(model)
    pipe.step(ragged_batch())
    with torch.no_grad():
        for parameter in pipe.parameters():
            parameter.zero_()
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in model.named_parameters())
