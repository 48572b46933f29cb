"""Threads that write checkpoints."""

from __future__ import annotations

import threading

from torch.optim import Optimizer

from penstock.pipeline.pipeline import Pipeline

Made = tuple[Pipeline, list[Optimizer]]


def writers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("penstock-checkpoint")]
