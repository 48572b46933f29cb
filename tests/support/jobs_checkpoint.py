"""Training that is saved and gone on with, in one process or in many."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, AdamW, NAdam, Optimizer, RMSprop
from torch.optim.lr_scheduler import CosineAnnealingLR
from transformers import AutoModelForCausalLM, PreTrainedModel

from penstock import AutoPipeline, Axes, Pipeline
from penstock.checkpoint.optimizer_state import OptimizerState
from penstock.checkpoint.save_load import CheckpointWriter, load_checkpoint
from penstock.models.weights.folder import Hashed
from support.families import ragged_batch, tiny_model

Parameters = list[nn.Parameter]
Maker = Callable[[Parameters], Optimizer | list[Optimizer]]
STEPS, SAVED = 4, 2  # of a whole run, and before the checkpoint


def adamw(parameters: Parameters) -> Optimizer:
    """Two groups with rates of their own."""
    matrices = [p for p in parameters if p.ndim > 1]
    vectors = [p for p in parameters if p.ndim == 1]
    groups = [{"params": matrices, "lr": 1e-2}, {"params": vectors, "lr": 3e-3, "weight_decay": 0.0}]
    return AdamW([group for group in groups if group["params"]], lr=1e-2)


def muon(parameters: Parameters) -> list[Optimizer]:
    inner = [p for p in parameters if p.ndim == 2]
    others = [p for p in parameters if p.ndim != 2]
    return [torch.optim.Muon(inner, lr=1e-2), AdamW(others, lr=1e-2)]


KINDS: dict[str, Maker] = {
    "adamw": adamw,
    "sgd": lambda parameters: SGD(parameters, lr=0.1),
    "momentum": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda parameters: Adagrad(parameters, lr=1e-2),
    "nadam": lambda parameters: NAdam(parameters, lr=1e-2),
    "rmsprop": lambda parameters: RMSprop(parameters, lr=1e-3, momentum=0.5, centered=True),
}
if hasattr(torch.optim, "Muon"):  # since torch 2.9
    KINDS["muon"] = muon


def make(
    ranks: int,
    schedule: Any,
    family: str = "llama",
    kind: str = "adamw",
    axes: Axes | None = None,
    layers: int = 4,
    timeout: float = 30.0,
) -> tuple[Pipeline, list[Optimizer]]:
    """A pipeline of a model that is always the same, and its optimizers."""
    auto = AutoPipeline(ranks=ranks, schedule=schedule, microbatches=8, timeout=timeout, axes=axes)
    pipe = auto.build(tiny_model(family, layers=layers))
    made = KINDS[kind]([p for p in pipe.parameters() if p.requires_grad])
    return pipe, made if isinstance(made, list) else [made]


def advance(pipe: Pipeline, optimizers: list[Optimizer], first: int, last: int) -> list[float]:
    """Losses of steps `first` to `last`."""
    losses = []
    for step in range(first, last + 1):
        pipe.zero_grad()
        losses.append(pipe.step(ragged_batch(8, 8 + step)).loss)
        pipe.clip_grad_norm_(1.0)
        for optimizer in optimizers:
            optimizer.step()
    return losses


def assert_same_run(family: str, path: Path, before: list[float], after: list[float]) -> None:
    """Losses before and after the checkpoint `path`, and its weights, are those of `whole_run`."""
    losses, model = whole_run(family)
    assert before == pytest.approx(losses[: SAVED + 1], rel=1e-5)
    assert after == pytest.approx(losses[SAVED:], rel=1e-5)
    opened = AutoModelForCausalLM.from_pretrained(path, experts_implementation="eager")
    batch = ragged_batch()["input_ids"]
    model.eval()
    # AdamW's first steps are as large for a gradient that is all rounding as for any other
    torch.testing.assert_close(opened(batch).logits, model(batch).logits, rtol=0, atol=2e-4)


def whole_run(family: str) -> tuple[list[float], PreTrainedModel]:
    """Losses of a run of the whole model by plain torch, and the model after step SAVED."""
    model = tiny_model(family, layers=8)
    optimizer = adamw(list(model.parameters()))
    schedule = CosineAnnealingLR(optimizer, T_max=STEPS)
    losses, saved = [], tiny_model(family, layers=8)
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        loss = model(**ragged_batch(8, 8 + step)).loss
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
        if step == SAVED:
            saved.load_state_dict(model.state_dict())
    return losses, saved


def begin(ranks: int, schedule: str, family: str, path: str) -> list[float]:
    """Steps 1 to SAVED, and one more while the checkpoint is written."""
    pipe, optimizers = make(ranks, schedule, family, layers=8)
    schedulers = [CosineAnnealingLR(optimizer, T_max=STEPS) for optimizer in optimizers]
    losses = []
    with CheckpointWriter(pipe) as writer:
        for step in range(1, SAVED + 2):
            losses += advance(pipe, optimizers, step, step)
            for scheduler in schedulers:
                scheduler.step()
            if step == SAVED:
                writer.save(path, optimizers, {"step": step, "last_epoch": schedulers[0].last_epoch})
    pipe.close()
    return losses


def go_on(ranks: int, schedule: str, family: str, path: str) -> list[float]:
    """Steps from the checkpoint's to STEPS."""
    pipe, optimizers = make(ranks, schedule, family, layers=8)
    schedulers = [CosineAnnealingLR(optimizer, T_max=STEPS) for optimizer in optimizers]
    state = load_checkpoint(path, pipe, optimizers)
    losses = []
    for scheduler in schedulers:
        scheduler.last_epoch = state["last_epoch"]
    for step in range(state["step"] + 1, STEPS + 1):
        losses += advance(pipe, optimizers, step, step)
        for scheduler in schedulers:
            scheduler.step()
    pipe.close()
    return losses


@contextmanager
def failing_writes(rank: int) -> Iterator[None]:
    """The optimizer's part of process `rank` cannot be written."""
    written = OptimizerState.write

    def write(self: OptimizerState, folder: Path, index: int, count: int) -> Hashed:
        if index == rank:
            raise OSError("disk full")
        return written(self, folder, index, count)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OptimizerState, "write", write)
        yield
