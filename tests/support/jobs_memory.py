"""What a rank holds, counted from outside: every storage that is made in a step, until it is gone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from penstock import AutoPipeline, Pipeline
from penstock.runtime.memory import Measured
from penstock.schedule import simulate
from support.families import tiny_model
from support.ragged import Microbatches, tokens

LARGEST_MESSAGE = 2 * 48 * 64 * 4  # bytes: rows, tokens, hidden
# Seconds that each look at what is held takes. The ops of so small a model are over before a busy machine has
# let a sender's thread run: with these they are as long, beside messages, as the ops of a real one.
OP = 0.015
# told by the rank, predicted, counted, and how many stages the rank hosts
Peaks = tuple[int, float, int, int]


def large(count: int, ragged: bool) -> Microbatches:
    """Long enough that activations are most of what a step makes."""
    lengths = [16 + (16 * number) % 40 if ragged else 48 for number in range(count)]
    return [{"input_ids": tokens(2, n, n), "labels": tokens(2, n, n)} for n in lengths]


def peaks(ranks: int, schedule: Any, ragged: bool, how: Any) -> Peaks:
    """At the moments at which the executor looks, so that what one op needs while it runs is left out."""
    torch.set_num_threads(1)
    model = tiny_model("llama", layers=24, hidden_size=64, intermediate_size=128)
    pipe = AutoPipeline(
        ranks=ranks, schedule=schedule, microbatches=8, timeout=30, activation_checkpointing=how
    ).build(model)
    batch = large(8, ragged)
    pipe.step(batch)  # measures each shape
    for parameter in pipe.parameters():
        parameter.grad = torch.zeros_like(parameter)
    forget_buffers(pipe)
    counted = count_bytes(pipe, batch)
    predicted = simulate(pipe.schedule, pipe.costs()).peak_memory[dist.get_rank()]
    told = pipe.memory[dist.get_rank()].total
    hosted = len(pipe.stages)
    pipe.close()
    return told, predicted, counted, hosted


def forget_buffers(pipe: Pipeline) -> None:
    """Those of the step before would not be counted."""
    channels: Any = pipe._world.transport
    channels._opened._pool._buffers.clear()


def count_bytes(pipe: Pipeline, batch: Sequence[Any]) -> int:
    most = 0
    (executor,) = pipe._training.executors
    look = executor.ops._buffers  # asked for where a step looks at what it holds

    def watch() -> int:
        nonlocal most
        time.sleep(OP)
        most = max(most, alive.nbytes)
        return look()

    with patch.object(executor.ops, "_buffers", watch), Measured() as alive:
        pipe.step(batch)
    return most
