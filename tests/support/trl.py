"""What TRL's trainers compute, step by step."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from support.reference import Gradients, gradients_of

ROWS = 4  # of a step


def trl_settings(kind: Any, folder: Path, **options: Any) -> Any:
    """The arguments of a trainer: plain SGD, a log of each step. kind: such as DPOConfig"""
    plain = {
        "output_dir": str(folder), "learning_rate": 1e-3, "lr_scheduler_type": "constant", "optim": "sgd",
        "max_grad_norm": 0, "num_train_epochs": 1, "logging_steps": 1, "report_to": [], "save_strategy": "no",
        "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "disable_tqdm": True,
        "per_device_train_batch_size": ROWS,
    }  # fmt: skip
    return kind(**plain | options)


def skip_kernels() -> None:
    """Skip where TRL calls a Triton kernel for logits, and nothing runs it: Triton without a GPU."""
    if find_spec("triton") is not None and not torch.cuda.is_available():
        pytest.skip("TRL's trainers call a Triton kernel where Triton is installed, and it needs a GPU")


def trl_steps(
    trainer: Any, settings: Any, model: Any, rows: list[dict[str, Any]], tokenizer: Any, **options: Any
) -> tuple[list[Gradients], list[dict[str, Any]]]:
    """Train over the rows in their order. Returns each step's gradients, and its log; skips as above."""
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import TrainerCallback

    skip_kernels()
    gradients, kept = list[Gradients](), list[dict[str, Any]]()

    class Keep(TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_pre_optimizer_step(self, *_: Any, **more: Any) -> None:
            gradients.append(gradients_of(more["model"]))

        def on_log(self, *_: Any, logs: Any = None, **more: Any) -> None:
            kept.extend([logs] if "loss" in logs else [])

    class InOrder(trainer):  # type: ignore[misc, unused-ignore]
        def _get_train_sampler(self, *_: Any, **more: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    data, keep = Dataset.from_list(rows), Keep()
    InOrder(
        model, args=settings, train_dataset=data, processing_class=tokenizer, callbacks=[keep], **options
    ).train()
    return gradients, kept
