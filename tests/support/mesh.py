"""Pipelines on a mesh compared with one plain process: batches, building, loss and gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from penstock import AutoPipeline, Axes, Pipeline
from penstock.errors import InputError
from support import zoo
from support.families import FAMILIES, tiny_model
from support.pool import Pool
from support.ragged import tokens
from support.reference import plain_step

ROWS, LENGTH = 8, 12


def batch(rows: int = ROWS, length: int = LENGTH) -> dict[str, Tensor]:
    """With labels so unevenly left out that each part of the batch counts for another number of items."""
    ids, labels = tokens(rows, length, 1), tokens(rows, length, 2)
    for row in range(rows):
        labels[row, : row % length] = -100
    return {"input_ids": ids, "labels": labels}


def own_part(whole: dict[str, Tensor], index: int, parts: int) -> dict[str, Tensor]:
    return {name: value.chunk(parts)[index] for name, value in whole.items()}


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


LAYERS = 2
Built = tuple[str, int, Axes, dict[str, Any]]  # family, ranks, axes, options


def error_of(call: Callable[[], Any]) -> str:
    """Type and text of the input error that `call` raises, or "accepted"."""
    try:
        call()
    except InputError as error:
        complete = all((error.value, error.rule, error.remedy))
        return f"{type(error).__name__}: {error}" if complete else f"not complete: {error!r}"
    return "accepted"


def model_of(family: str, **sizes: Any) -> PreTrainedModel:
    if family not in FAMILIES:
        return zoo.tiny_model(family)
    return tiny_model(family, torch.float64, **{"layers": LAYERS, **sizes})


def build_pipe(family: str, ranks: int, axes: Axes | None, options: Mapping[str, Any]) -> Pipeline:
    """options: AutoPipeline's, and the model's sizes as "model"."""
    options = dict(options)
    return build_whole(model_of(family, **options.pop("model", {})), ranks, axes, **options)


def build_whole(model: Any, ranks: int, axes: Axes | None, **options: Any) -> Pipeline:
    """The pipeline of a model, its config or its folder; 1f1b, two microbatches unless `options` differ."""
    common: dict[str, Any] = {"schedule": "1f1b", "microbatches": 2, "timeout": 30.0, **options}
    return AutoPipeline(ranks=ranks, axes=axes, **common).build(model)


def later(*cases: Any, mark: pytest.MarkDecorator = pytest.mark.parallel) -> list[Any]:
    """Cases for `make parallel` alone."""
    return [pytest.param(*case, marks=mark) for case in cases]


def worst_gradient(pipe: Pipeline, expected: Mapping[str, Tensor], times: float = 1.0) -> tuple[float, str]:
    """How far this process's gradients are from `times` those expected, relative to each one's largest entry:
    the worst, and its name."""
    worst = 0.0, ""
    for name, parameter in pipe.named_parameters(remove_duplicate=False):
        name = name.replace("_orig_mod.", "")  # of a compiled layer
        assert parameter.grad is not None, name
        difference = float((full(parameter.grad) / times - expected[name]).abs().max())
        worst = max(worst, (difference / max(float(expected[name].abs().max()), 1e-300), name))
    return worst


def same_on_all(found: list[Any]) -> Any:
    """The answer of all ranks, which is the same."""
    assert all(answer == found[0] for answer in found), found
    return found[0]


def exact_steps(family: str, ranks: int, axes: Axes, schedule: Any, options: dict[str, Any]) -> set[str]:
    """An evaluation and two steps, the second without clearing, are those of the whole model.

    Returns the names of this process's parameters.
    """
    model, whole = _whole_model(family, options), batch()
    options = {name: value for name, value in options.items() if name not in ("tied", "model")}
    loss, expected = plain_step(model, whole)
    norm = torch.stack([expected[name].norm() for name, _ in model.named_parameters()]).norm()  # tied: once
    pipe = build_whole(model, ranks, axes, schedule=schedule, **options)
    mine = own_part(whole, *pipe.batch_part)
    kinds = {name: type(parameter.data) for name, parameter in pipe.named_parameters()}
    assert pipe.evaluate(mine).loss == pytest.approx(loss, rel=1e-10)
    for _ in range(2):
        result = pipe.step(mine)
        assert result.loss == pytest.approx(loss, rel=1e-10)
        assert result.tokens == int((whole["labels"][:, 1:] != -100).sum())
    assert kinds == {name: type(parameter.data) for name, parameter in pipe.named_parameters()}
    worst, name = worst_gradient(pipe, expected, times=2)
    assert worst < 1e-10, f"{name} differs by {worst}"
    assert not pipe.schedule.split or min(pipe.deferred_bytes) > 0  # the weights' half waits, of DTensors too
    assert pipe.clip_grad_norm_(1e9) == pytest.approx(2 * float(norm), rel=1e-9)
    names = dict(pipe.named_parameters(remove_duplicate=False))
    pipe.close()
    return {*names}


def _whole_model(family: str, options: Mapping[str, Any]) -> PreTrainedModel:
    sizes = options.get("model", {})
    return tiny_model(family, torch.float64, layers=4, tied=options.get("tied", False), **sizes)


def compare(
    pool: Pool, family: str, ranks: int, axes: Axes, schedule: Any, options: dict[str, Any], world: int = 4
) -> None:
    """options: AutoPipeline's, and the model's: "tied", and sizes as "model"."""
    found = pool.run(world, exact_steps, family, ranks, axes, schedule, options)
    model = _whole_model(family, options)
    # a single stage yields a tied weight once
    missing = dict(model.named_parameters(remove_duplicate=ranks == 1)).keys() - set().union(*found)
    assert not missing


class Piece(nn.Module):
    """y = tanh(W x), with values of its stage, or of this process where they are to differ."""

    def __init__(self, stage: int, *, random: bool = False) -> None:
        super().__init__()
        torch.manual_seed(stage + (100 * dist.get_rank() if random else 0))
        self.own = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.tanh(self.own(x))
        return result


def pieces(ranks: int, axes: Axes, options: dict[str, Any], *, random: bool = False) -> Pipeline:
    common: dict[str, Any] = {
        "schedule": "1f1b",
        "loss_fn": lambda output, microbatch: output.square().mean(),
        "timeout": 5,
    }
    return Pipeline.from_provider(
        lambda info: Piece(info.stage, random=random), ranks=ranks, microbatches=2, axes=axes,
        **{**common, **options},
    )  # fmt: skip


Steps = tuple[list[float], list[float]]  # the loss and the gradients' norm of each


def train(
    pipe: Pipeline, whole: dict[str, Tensor], optimizers: Sequence[Optimizer], steps: int, max_norm: float
) -> Steps:
    losses, norms = [], []
    for _ in range(steps):
        losses.append(pipe.step(own_part(whole, *pipe.batch_part)).loss)
        norms.append(pipe.clip_grad_norm_(max_norm))
        for optimizer in optimizers:
            optimizer.step()
        pipe.zero_grad()
    return losses, norms


def train_alone(
    model: PreTrainedModel,
    whole: dict[str, Tensor],
    optimizers: Sequence[Optimizer],
    steps: int,
    max_norm: float,
) -> Steps:
    """The same in one plain process."""
    losses, norms = [], []
    for _ in range(steps):
        loss, gradients = plain_step(model, whole)
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name]
        losses.append(loss)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        for optimizer in optimizers:
            optimizer.step()
    return losses, norms
