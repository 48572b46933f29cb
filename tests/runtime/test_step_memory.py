"""A step reports the bytes that it holds, and they are those that were predicted."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock import AutoPipeline, Pipeline
from penstock.models.activation_checkpointing import Checkpointing
from penstock.runtime.device.footprints import (
    footprint,
    is_held_elsewhere,
)
from penstock.runtime.device.memory import Measured
from penstock.schedule import simulate
from support.families import tiny_model
from support.pool import Pool
from support.ragged import Microbatches, tokens
from support.schedules import FORMS

SCHEDULES = ["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "dualpipe_v"]


MODES = {"kept": False, "full": "full", "one": Checkpointing(in_flight=1)}


DEFAULT = (("zb_v", True, "kept"),)


CASES = [
    pytest.param(*case, marks=() if case in DEFAULT else pytest.mark.sweep)
    for case in product(SCHEDULES, (False, True), MODES)
]


@pytest.mark.sweep
@pytest.mark.parametrize(("form", "ragged", "how"), CASES)
def test_a_step_reports_what_it_holds_as_predicted(pool: Pool, form: str, ragged: bool, how: str) -> None:
    assert_as_counted(pool.run(4, peaks, 4, FORMS[form], ragged, MODES[how], "gloo"))


@pytest.mark.sweep
@pytest.mark.parametrize("form", ["zb_v", "1f1b"])
def test_under_autocast_as_well_without_the_casts_of_weights(pool: Pool, form: str) -> None:
    assert_as_counted(pool.run(4, peaks, 4, FORMS[form], False, False, "gloo", True))


def assert_as_counted(found: Sequence[Peaks]) -> None:
    """Within 5 %, or a message for each stage: one more or less is a question of who is how fast just then,
    and where all layers are checkpointed it is a large part of what is left."""
    for rank, (reported, predicted, counted, hosted) in enumerate(found):
        assert reported == pytest.approx(counted, rel=0.01), (rank, "reported", "counted")
        scalars = 8 * (4 + 8)  # bytes: of each microbatch a loss and a count
        near = pytest.approx(counted, rel=0.05, abs=hosted * (LARGEST_MESSAGE + scalars))
        assert predicted == near, (rank, "predicted", "counted")


@pytest.mark.parametrize(
    ("form", "ragged", "how"), [*DEFAULT, pytest.param("1f1b", True, "one", marks=pytest.mark.sweep)]
)
def test_over_shared_memory_a_step_holds_what_is_predicted(
    pool: Pool, form: str, ragged: bool, how: str
) -> None:
    """Where a result waits, with its sender, is its receiver's memory over gloo."""
    for reported, predicted, _, hosted in pool.run(4, peaks, 4, FORMS[form], ragged, MODES[how], None):
        assert reported == pytest.approx(predicted, rel=0.05, abs=2 * hosted * LARGEST_MESSAGE)


class Keeps(nn.Module):
    """tanh saves what it gives; a sum saves nothing."""

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self._keeps = keeps

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.linear(x)
        return torch.tanh(hidden) if self._keeps else x + hidden


@pytest.mark.parametrize("keeps", [False, True])
def test_an_output_that_the_graph_keeps_counts_as_activation(keeps: bool) -> None:
    x, module = torch.randn(3, 4, requires_grad=True), Keeps(keeps)
    with Measured() as measured:
        output = module(x)
    left = footprint(measured.nbytes, [x], [output])
    assert is_held_elsewhere(output) == keeps
    assert left.output == (0 if keeps else output.nbytes)
    assert left.activation == x.nbytes + (output.nbytes if keeps else 0)


LARGEST_MESSAGE = 2 * 48 * 64 * 4  # bytes: rows, tokens, hidden


# Seconds that each look at what is held takes. The ops of so small a model are over before a busy machine has
# let a sender's thread run: with these they are as long, next to messages, as the ops of a real one.
OP = 0.015


# reported by the rank, predicted, counted, and how many stages the rank hosts
Peaks = tuple[int, float, int, int]


def large(count: int, ragged: bool) -> Microbatches:
    """Long enough that activations are most of what a step makes."""
    lengths = [16 + (16 * number) % 40 if ragged else 48 for number in range(count)]
    return [{"input_ids": tokens(2, n, n), "labels": tokens(2, n, n)} for n in lengths]


def peaks(
    ranks: int, schedule: Any, ragged: bool, how: Any, transport: str | None, autocast: bool = False
) -> Peaks:
    """At the moments at which the executor looks, so that what one op needs while it runs is left out."""
    torch.set_num_threads(1)
    model = tiny_model("llama", layers=24, hidden_size=64, intermediate_size=128)
    pipe = AutoPipeline(
        ranks=ranks, schedule=schedule, microbatches=8, timeout=30, activation_checkpointing=how,
        transport=transport,
    ).build(model)  # fmt: skip
    batch = large(8, ragged)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        pipe.step(batch)  # measures each shape
        for parameter in pipe.parameters():
            parameter.grad = torch.zeros_like(parameter)
        if transport is None:
            counted = 0  # its messages are in no tensor that the step makes
            pipe.step(batch)
        else:
            forget_buffers(pipe)
            counted = count_bytes(pipe, batch)
    predicted = simulate(pipe.schedule, pipe.costs()).peak_memory[dist.get_rank()]
    reported = pipe.memory[dist.get_rank()].total
    hosted = len(pipe.stages)
    pipe.close()
    return reported, predicted, counted, hosted


# _world, _pool: idle buffers of an earlier step go
def forget_buffers(pipe: Pipeline) -> None:
    """Those of the step before would not be counted."""
    channels: Any = pipe._world.transport.messages
    channels._pool._buffers.clear()


# _training, _messages: bytes are counted at each op, where a step looks at what it holds
def count_bytes(pipe: Pipeline, batch: Sequence[Any]) -> int:
    most = 0
    (executor,) = pipe._training.executors
    messages = executor.memory._messages  # asked where a step looks at what it holds

    class Watched:
        @property
        def buffer_bytes(self) -> int:
            nonlocal most
            time.sleep(OP)
            casts = sum(s.nbytes() for stage in executor.stages.values() for s in stage.casts.storages)
            most = max(most, alive.nbytes - casts)
            return int(messages.buffer_bytes)

    with patch.object(executor.memory, "_messages", Watched()), Measured() as alive:
        pipe.step(batch)
    return most
