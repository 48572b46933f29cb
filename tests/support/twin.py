"""The training loop that one writes by hand in one process, with transformers and torch alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import AutoModelForCausalLM, PreTrainedModel

from penstock.train.check.before_training import Reference
from penstock.train.config.sections import TrainConfig
from penstock.train.preflight import Prepared, preflight
from support.reference import Gradients, plain_steps
from support.tiny import config, save_model

Make = Callable[[Sequence[tuple[str, nn.Parameter]]], list[Optimizer]]
RATE, DECAY = 1e-2, 0.1
# of AdamW and its relatives
OPTIONS: dict[str, Any] = {"lr": RATE, "betas": (0.9, 0.95), "eps": 1e-8}


def made(folder: Path, precision: str | None, optimizer: Mapping[str, Any], **keys: Any) -> TrainConfig:
    """The config of four steps on weights that are saved in `folder`. keys: of tiny.config"""
    folder.mkdir(exist_ok=True)
    save_model(folder / "model", **keys.pop("model", {}))
    tree = {"optimizer": {"schedule": "constant", "learning_rate": RATE, **optimizer}, "train.clip_norm": 0.5}
    tree["train.precision"] = precision
    path = {"model": {"path": str(folder / "model")}}
    return config(folder, keys={**path, **tree, **keys})


def documents_alone(prepared: Prepared, rows: int) -> tuple[int, float, Gradients]:
    """Tokens that count, loss and gradients of a run's first rows: each document in a forward of its own."""
    data, device = prepared.data, torch.device("cpu")
    assert data.sampler is not None
    pieces = [piece for row in data.sampler.rows(0, rows) for piece in data.rows.read(row)]
    given = [{"input_ids": piece.ids, "labels": piece.labels} for piece in pieces]
    batches = [{name: torch.from_numpy(values[None]) for name, values in each.items()} for each in given]
    model = Reference(prepared.plan.source, prepared.auto.seed, prepared.auto.loss()).build(device)
    return sum(int((b["labels"][:, 1:] != -100).sum()) for b in batches), *plain_steps(model, batches)


def decayed(named: Iterable[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
    """Matrices decay, and vectors do not."""
    named = list(named)
    return [
        {"params": [p for _, p in named if p.ndim > 1], "weight_decay": DECAY},
        {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0},
    ]


def by_hand(
    made: TrainConfig, make: Make, *, before_step: Callable[[int], None] = lambda step: None
) -> tuple[list[float], PreTrainedModel]:
    """The losses, and the trained model. before_step: called with the step's number before the optimizers"""
    precision = made.train.precision
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(str(made.model.path), dtype=dtype).train()
    optimizers, data, losses = make(list(model.named_parameters())), preflight(made).data.of(0), []
    for step in range(1, made.train.last + 1):
        model.zero_grad()
        losses.append(_accumulate(model, data.batch(step).content, made.pipeline.microbatches, precision))
        _clip([p.grad for p in model.parameters() if p.grad is not None], made.train.clip_norm or 1e9)
        before_step(step)
        for optimizer in optimizers:
            optimizer.step()
    return losses, model


@torch.no_grad()
def _clip(gradients: list[Tensor], limit: float) -> None:
    """As torch.nn.utils.clip_grad_norm_, but that the norms are summed in float64, as half would round."""
    norm = torch.stack(list(torch._foreach_norm(gradients))).double().square().sum().sqrt()
    torch._foreach_mul_(gradients, min(1.0, limit / (float(norm) + 1e-6)))


def _accumulate(model: PreTrainedModel, content: Any, microbatches: int, precision: str | None) -> float:
    weight, loss = int((content["labels"][:, 1:] != -100).sum()), 0.0
    ids, labels = (content[name].chunk(microbatches) for name in ("input_ids", "labels"))
    for inputs, targets in zip(ids, labels, strict=True):
        with torch.autocast("cpu", torch.bfloat16) if precision == "mixed" else nullcontext():
            logits = model(input_ids=inputs, use_cache=False).logits[:, :-1].float()
            total = F.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten(), reduction="sum")
        (total / weight).backward()  # type: ignore[no-untyped-call]
        loss += float(total.detach()) / weight
    return loss


def largest_difference(found: Mapping[str, Tensor], model: PreTrainedModel) -> float:
    """Of any weight, relative to its largest entry."""
    expected = dict(model.named_parameters())
    assert found.keys() == expected.keys()
    return max(
        float((found[name].float() - p.detach().float()).abs().max() / p.detach().abs().max())
        for name, p in expected.items()
    )
