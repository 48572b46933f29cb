"""The pipeline in a training loop: steps, optimizers and norms, next to the same loop in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from penstock import AutoPipeline, Pipeline
from penstock.batch.loss import NextToken
from penstock.pipeline.compare import whole_backward
from support.covering import every
from support.families import pipeline, ragged_batch, tiny_model
from support.pool import Pool
from support.reference import TOLERANCE, assert_gradients, gradients_of, plain_step


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


@pytest.mark.parametrize("schedule", [pytest.param("1f1b", marks=pytest.mark.sweep), "zb_v"])
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
    for _ in range(2):
        for length in (10, 11):
            accumulate(model, ragged_batch(8, length))
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
    """This rank's weights after two steps, each of two that are accumulated, with compiled layers."""
    options = AutoPipeline(ranks=2, schedule="zb_v", microbatches=4, timeout=30, parallelize_fn=compiled)
    pipe = options.build(tiny_model("llama", torch.float64, tied=True))
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    for _ in range(2):
        for length in (10, 11):
            pipe.step(ragged_batch(8, length))
        pipe.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in pipe.named_parameters(remove_duplicate=False)}
