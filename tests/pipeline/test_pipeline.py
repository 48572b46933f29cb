"""The pipeline in a training loop: steps, optimizers and norms, next to the same loop in one process."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from penstock import AutoPipeline, Axes, Pipeline
from penstock.batch.loss import NextToken
from penstock.errors import AlteredError, BatchError
from penstock.models.weights import folder
from penstock.models.weights.folder import MANIFEST, sha256_of
from penstock.pipeline.compare import whole_backward
from support import jobs
from support.covering import every
from support.families import pipeline, ragged_batch, tiny_config, tiny_model
from support.folders import flip
from support.pool import Pool
from support.reference import TOLERANCE, assert_gradients, gradients_of, plain_step


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
    with pytest.raises(AlteredError, match=rf"{shard.name}: its contents differ from what was written"):
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


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_norm_counts_a_tied_weight_once(ranks: int) -> None:
    model = tiny_model("llama", torch.float64, tied=True)
    _, gradients = plain_step(model, ragged_batch())
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name]
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    pipe = AutoPipeline(ranks=ranks, microbatches=3).build(model)
    pipe.step(ragged_batch())
    assert pipe.clip_grad_norm_(0.1) == pytest.approx(float(expected), rel=1e-9)
    assert pipe.clip_grad_norm_(1.0) == pytest.approx(0.1, rel=1e-4)
    assert {name for name, _ in pipe.owned_parameters()} == set(dict(model.named_parameters()))


def test_a_model_in_evaluation_mode_is_trained_all_the_same() -> None:
    """0.1.0: from_pretrained gives evaluation mode, in which transformers checkpoints no activations."""
    pipe = AutoPipeline(ranks=2, microbatches=2, activation_checkpointing=True).build(
        tiny_model("llama").eval()
    )
    plain = pipeline(tiny_model("llama"))
    assert tensors_saved_by(pipe) < tensors_saved_by(plain)


def tensors_saved_by(pipe: Pipeline) -> int:
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(1) or t, lambda t: t):  # type: ignore[func-returns-value]
        pipe.step(ragged_batch())
    return len(saved)


def test_a_refused_batch_costs_no_gradient() -> None:
    """0.1.0: tied weights lost what earlier steps had accumulated."""
    pipe = pipeline(tiny_model("llama", tied=True))
    pipe.step(ragged_batch())
    before = gradients_of(pipe)
    with pytest.raises(BatchError):
        pipe.step(ragged_batch(2))
    torch.testing.assert_close(gradients_of(pipe), before, rtol=0, atol=0)


def test_a_tied_weight_that_is_unfrozen_later() -> None:
    """0.1.0: what was frozen when the pipeline was built was never summed."""
    model = tiny_model("llama", tied=True)
    model.lm_head.weight.requires_grad_(False)
    pipe = pipeline(model)
    pipe.step(ragged_batch())
    assert not [name for name in gradients_of(pipe) if "embed" in name or "head" in name]
    for parameter in (*pipe.parameters(), *model.parameters()):
        parameter.requires_grad_(True)
    pipe.verify_against(model, ragged_batch())


def test_a_step_turns_gradients_on() -> None:
    pipe = pipeline(tiny_model("llama"))
    with torch.no_grad():
        pipe.step(ragged_batch())
    assert all(p.grad is not None for p in pipe.parameters())


def test_verify_against_leaves_dropout_out() -> None:
    model = tiny_model("gpt2", resid_pdrop=0.5)
    pipeline(model).verify_against(model, ragged_batch())
    assert model.training


def test_the_model_stays_as_it_was() -> None:
    model = tiny_model("gemma3_text", tied=True)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    pipe = pipeline(model)
    pipe.step(ragged_batch())
    with torch.no_grad():
        for parameter in pipe.parameters():
            parameter.zero_()
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in model.named_parameters())


def test_batches_that_cannot_be_stepped_on() -> None:
    pipe = pipeline(tiny_config("llama"))
    with pytest.raises(BatchError, match="a batch of 3 rows"):
        pipe.step(ragged_batch(3))
    with pytest.raises(BatchError, match="reads 'labels'"):
        pipe.step({"input_ids": ragged_batch()["input_ids"]})
    with pytest.raises(BatchError, match="without a valid token"):
        pipe.step({**ragged_batch(), "labels": torch.full((8, 10), -100)})
    pipe.step(ragged_batch())  # and it goes on


def test_a_loss_of_ones_own() -> None:
    model, batch = tiny_model("llama", torch.float64), ragged_batch(6)

    def spread(logits: torch.Tensor, microbatch: object) -> torch.Tensor:
        return logits.var(dim=-1).mean()

    pipe = AutoPipeline(ranks=2, microbatches=4, loss_fn=spread).build(model)
    result = pipe.step(batch)
    expected = spread(model(batch["input_ids"], use_cache=False).logits, batch)
    expected.backward()  # type: ignore[no-untyped-call]
    assert result.loss == pytest.approx(float(expected.detach()), rel=1e-10)
    for name, parameter in pipe.named_parameters(remove_duplicate=False):
        torch.testing.assert_close(parameter.grad, model.get_parameter(name).grad)


def test_all_ranks_return_the_same_numbers(pool: Pool) -> None:
    answers = pool.run(3, jobs.results, "qwen2", 3, 4)
    assert answers[0] == answers[1] == answers[2]
    evaluated, loss, tokens, bubble, norm, clipped = answers[0]
    model = tiny_model("qwen2")
    expected, gradients = plain_step(model, ragged_batch())
    assert evaluated == pytest.approx(expected, rel=1e-5)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert tokens == int((ragged_batch()["labels"][:, 1:] != -100).sum())
    assert 0 < bubble < 1
    total = torch.stack([gradients[name].norm() for name, _ in model.named_parameters()]).norm()
    assert norm == pytest.approx(float(total), rel=1e-5)
    assert clipped == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
def test_autocast(schedule: str) -> None:
    """Rounded as one process rounds that takes the same microbatches."""
    model, batch = tiny_model("llama"), ragged_batch()
    pipe = pipeline(model, schedule=schedule)
    with torch.autocast("cpu", torch.bfloat16):
        found = pipe.step(batch).loss
        expected = whole_backward(model, pipe.microbatches(batch), NextToken())
    assert found == pytest.approx(expected, rel=1e-6)
    assert_gradients(gradients_of(pipe), gradients_of(model), 1e-2)  # one rounding of bfloat16
    assert found != pytest.approx(plain_step(model, batch)[0], rel=1e-7)  # it was on


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
def test_weights_of_half_precision(schedule: str) -> None:
    model, batch = tiny_model("qwen3", torch.bfloat16), ragged_batch()
    pipe = pipeline(model, schedule=schedule)
    pipe.verify_against(model, batch)
    found = pipe.step(batch).loss
    assert found == pytest.approx(whole_backward(model, pipe.microbatches(batch), NextToken()), rel=1e-3)
    assert all(parameter.dtype == torch.bfloat16 for parameter in pipe.parameters())
    assert_gradients(gradients_of(pipe), gradients_of(model), 3e-2)
    _, exact = plain_step(tiny_model("qwen3"), batch)
    for name, gradient in gradients_of(pipe).items():
        assert (gradient.float() - exact[name]).norm() < 0.1 * exact[name].norm(), name
    torch.optim.AdamW(pipe.parameters()).step()


def sgd(named: list[tuple[str, nn.Parameter]]) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9, nesterov=True)]


def groups(named: list[tuple[str, nn.Parameter]]) -> list[torch.optim.Optimizer]:
    """By name: no decay for norms, another rate for the embedding."""
    made: list[dict[str, Any]] = [
        {"params": [p for name, p in named if "norm" in name], "weight_decay": 0.0},
        {"params": [p for name, p in named if "embed" in name], "lr": 1e-3},
        {"params": [p for name, p in named if "norm" not in name and "embed" not in name]},
    ]
    return [torch.optim.AdamW([group for group in made if group["params"]], lr=1e-2, weight_decay=0.3)]


def muon(named: list[tuple[str, nn.Parameter]]) -> list[torch.optim.Optimizer]:
    """Matrices of the layers by Muon, the rest by AdamW, as usual."""
    inner = [p for name, p in named if p.dim() == 2 and ".layers." in name]
    rest = [p for name, p in named if not (p.dim() == 2 and ".layers." in name)]
    return [torch.optim.Muon(inner, lr=1e-2), torch.optim.AdamW(rest, lr=1e-2)]


@pytest.mark.parametrize(
    ("optimizers", "tied"), every(2, [(groups, True), (sgd, False), (muon, True), (groups, False)])
)
def test_any_optimizer(optimizers: Callable[..., list[torch.optim.Optimizer]], tied: bool) -> None:
    """Two steps of two accumulated batches, on three ranks, as in one process."""
    model = tiny_model("llama", torch.float64, tied=tied, layers=3)
    pipe = pipeline(model, ranks=3)
    # of a tied weight the one name that it has in one process, or its copies would go into several groups
    ours = optimizers(list(pipe.named_parameters()))
    plain = optimizers(list(model.named_parameters()))
    for step in range(2):
        for half in range(2):
            batch = ragged_batch(8, 8 + 2 * step + half)
            accumulate(model, batch)
            pipe.step(batch)
        for optimizer in (*ours, *plain):
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in pipe.named_parameters(remove_duplicate=False):
        # Muon orthogonalises in bfloat16, so that a rounding may become a bit of that
        tolerance = 1e-4 if optimizers is muon else 1e-8
        torch.testing.assert_close(parameter, model.get_parameter(name), rtol=0, atol=tolerance)


def accumulate(model: PreTrainedModel, batch: dict[str, Tensor]) -> None:
    """One process's gradients of `batch`, added to those that are there."""
    before = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    _, found = plain_step(model, batch)
    for name, parameter in model.named_parameters():
        earlier = before[name]
        parameter.grad = found[name] if earlier is None else earlier + found[name]


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v", "dualpipe"])
def test_gradients_accumulate_over_steps(schedule: str) -> None:
    """A shared weight's sum is not summed again."""
    model = tiny_model("llama", tied=True)
    pipe = pipeline(model, schedule=schedule)
    for length in (8, 11, 9):
        accumulate(model, ragged_batch(8, length))
        pipe.step(ragged_batch(8, length))
    expected = gradients_of(model)
    found = gradients_of(pipe)
    assert found.keys() == expected.keys()
    assert_gradients(found, expected, TOLERANCE[torch.float32])


def test_a_loop_over_processes(pool: Pool) -> None:
    """Compiled layers, accumulated steps, tied weights, clipping, AdamW."""
    model = tiny_model("llama", torch.float64, tied=True)
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        for half in range(2):
            accumulate(model, ragged_batch(8, 10 + 2 * step + half))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        plain.step()
        plain.zero_grad()
    held: dict[str, Tensor] = {}
    for rank in pool.run(2, trained):
        held |= rank
    assert held.keys() | {"lm_head.weight"} == dict(model.named_parameters(remove_duplicate=False)).keys()
    for name, parameter in held.items():
        torch.testing.assert_close(parameter, model.get_parameter(name).detach(), rtol=0, atol=1e-8)


def compiled(part: nn.Module) -> nn.Module:
    """Each layer by itself, in place."""
    for module in part.modules():
        if type(module).__name__ == "LlamaDecoderLayer":
            module.compile(backend="eager")
    return part


def trained() -> dict[str, torch.Tensor]:
    """This rank's weights after three steps, each of two that are accumulated, with compiled layers."""
    options = AutoPipeline(ranks=2, schedule="zb_v", microbatches=4, timeout=30, parallelize_fn=compiled)
    pipe = options.build(tiny_model("llama", torch.float64, tied=True))
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    for step in range(3):
        for half in range(2):
            pipe.step(ragged_batch(8, 10 + 2 * step + half))
        pipe.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in pipe.named_parameters(remove_duplicate=False)}


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("max_norm", [1.0, math.inf])
def test_a_norm_that_is_not_finite_clips_as_torch_does(odd: float, max_norm: float) -> None:
    """0.5.0: with a norm of NaN no gradient changed, as NaN is not below 1: torch makes all of them NaN."""
    model = tiny_model("llama")
    pipe = pipeline(model)
    pipe.step(ragged_batch())
    for name, gradient in gradients_of(pipe).items():
        model.get_parameter(name).grad = gradient
    for named in (dict(pipe.named_parameters()), dict(model.named_parameters())):
        first = named["model.norm.weight"].grad
        assert first is not None
        first[0] = odd
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    torch.testing.assert_close(pipe.clip_grad_norm_(max_norm), float(norm), equal_nan=True)
    torch.testing.assert_close(gradients_of(pipe), gradients_of(model), rtol=0, atol=0, equal_nan=True)
