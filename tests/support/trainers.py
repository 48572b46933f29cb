"""transformers' Trainer in one process, and PipelineTrainer on ranks: what each has logged and called."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    EarlyStoppingCallback,
    EvalPrediction,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from penstock import AutoPipeline, Axes, Pipeline
from penstock.integrations import PipelineTrainer
from support.mesh import full
from support.tiny import QWEN3

# durations, and what only one of the two trainers logs
MEASURED = ("_runtime", "_per_second", "_preparation_time")
Rows = list[dict[str, Tensor]]


class Seen(NamedTuple):
    """What a trainer has logged and called, with the last weights of this process by name."""

    logs: list[dict[str, float]]
    events: list[str]
    weights: dict[str, Tensor]
    best: str | None
    step: int


class Recorded(TrainerCallback):  # type: ignore[misc]  # transformers is not followed
    """Records each event, with the state that the callback sees."""

    def __init__(self) -> None:
        self.events: list[str] = []
        for event in [name for name in dir(TrainerCallback) if name.startswith("on_")]:
            setattr(self, event, partial(self._record, event))

    def _record(self, event: str, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.events.append(f"{event} {state.global_step} {state.epoch and round(state.epoch, 4)}")


class Drawing(TrainerCallback):  # type: ignore[misc]  # transformers is not followed
    """Seeds each rank in another way, and records a number that each step draws."""

    def __init__(self, rank: int) -> None:
        self.rank, self.drawn = rank, dict[int, float]()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        torch.manual_seed(self.rank)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.drawn[state.global_step + 1] = torch.rand(()).item()


def rows(count: int, seed: int, length: int = 12) -> Rows:
    """Rows whose labels leave out another number of tokens each."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 256, (count, length), generator=generator)
    labels = ids.clone()
    for row in range(count):
        labels[row, : row % (length // 2)] = -100
    return [{"input_ids": ids[row], "labels": labels[row]} for row in range(count)]


def arguments(folder: Path | str, **more: Any) -> TrainingArguments:
    """Two epochs of 3 steps over 11 rows, so that the last batch of an epoch is not full."""
    default = {
        "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "num_train_epochs": 2,
        "learning_rate": 1e-2, "weight_decay": 0.1, "warmup_steps": 2, "max_grad_norm": 0.5,
        "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2,
        "report_to": [], "use_cpu": True, "disable_tqdm": True,
    }  # fmt: skip
    return TrainingArguments(str(folder), **{**default, **more})


def model(dropout: float = 0.0) -> PreTrainedModel:
    """In float64: what differs by more than a hair is no rounding."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(**QWEN3, attention_dropout=dropout)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float64)


def pipeline(
    axes: Axes | None = None, microbatches: int = 2, dropout: float = 0.0, **options: Any
) -> Pipeline:
    options = {"schedule": "1f1b", "device": "cpu", "head_weight": 1, **options}
    return AutoPipeline(ranks=2, microbatches=microbatches, axes=axes, **options).build(model(dropout))


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """The share of next tokens that the logits name, and a sum of all logits."""
    logits, labels = torch.as_tensor(prediction.predictions), torch.as_tensor(prediction.label_ids)
    counted = labels[:, 1:] != -100
    right = (logits[:, :-1].argmax(-1) == labels[:, 1:])[counted]
    return {"accuracy": right.double().mean().item(), "logits": logits.double().abs().mean().item()}


def options(
    stopping: bool = False, metrics: bool = False, more: Sequence[TrainerCallback] = ()
) -> dict[str, Any]:
    """What both trainers take beside their model and arguments. more: callbacks"""
    callbacks: list[TrainerCallback] = [Recorded(), *more]
    if stopping:
        callbacks.append(EarlyStoppingCallback(1))
    measured = {"compute_metrics": accuracy} if metrics else {}
    return {"train_dataset": rows(11, 1), "eval_dataset": rows(11, 2), "callbacks": callbacks, **measured}


def seen(trainer: Trainer, weights: dict[str, Tensor]) -> Seen:
    recorded = next(c for c in trainer.callback_handler.callbacks if isinstance(c, Recorded))
    logs = [
        {name: value for name, value in entry.items() if not name.endswith(MEASURED)}
        for entry in trainer.state.log_history
    ]
    best = trainer.state.best_model_checkpoint
    return Seen(logs, recorded.events, weights, best and Path(best).name, trainer.state.global_step)


def plain(folder: Path, given: dict[str, Any] | None = None, **more: Any) -> Seen:
    """Train with transformers' own Trainer in this process."""
    trainer = Trainer(model=model(), args=arguments(folder, **more), **options(**given or {}))
    trainer.train()
    weights = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
    return seen(trainer, weights)


def train(
    folder: Path,
    axes: Axes | None = None,
    given: dict[str, Any] | None = None,
    built: dict[str, Any] | None = None,
    resume: str | None = None,
    **more: Any,
) -> Seen:
    """Train with PipelineTrainer, on this rank or with all ranks in this process."""
    with as_launched():
        args = arguments(folder, **more)
        pipe = pipeline(axes, **(built or {}))
        trainer = PipelineTrainer(pipe, args, **options(**given or {}))
        trainer.train(resume_from_checkpoint=resume and str(folder / resume))
        weights = {name: full(value.detach()).clone() for name, value in pipe.owned_parameters()}
        pipe.close()
        return seen(trainer, weights)


@contextmanager
def as_launched() -> Iterator[None]:
    """Inside, accelerate sees the job as torchrun would have started it; afterwards it forgets the job."""
    environment = {}
    if dist.is_initialized():
        rank, world = str(dist.get_rank()), str(dist.get_world_size())
        environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # read, though the job exists
    forget()
    try:
        with mock.patch.dict(os.environ, environment):
            yield
    finally:
        forget()


def forget() -> None:
    """Clear accelerate's global state."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    PartialState._reset_state()
