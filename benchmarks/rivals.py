"""The same step by penstock and by torch.distributed.pipelining."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from penstock import Pipeline
from penstock.batch.shapes import Microbatch
from penstock.schedule import Op, Placement, Schedule, loop, wave
from penstock.schedule.choose import ScheduleLike

SCHEDULES = ("gpipe", "1f1b")
TORCH: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": ScheduleInterleavedZeroBubble,
    "zb_v": ScheduleZBVZeroBubble,
    "dualpipe_v": ScheduleDualPipeV,
}


def placement(schedule: str, ranks: int) -> Placement:
    """Of torch's schedules, and of penstock's of the same name."""
    if schedule in SCHEDULES:
        return loop(ranks)
    return wave(ranks) if schedule in ("zb_v", "dualpipe_v") else loop(ranks, 2)


class Work(NamedTuple):
    """What one step computes; the same for both. `module` makes the module of any stage.

    batch: rows for the first stage to read, and targets of the same rows for the loss, on the device to use
    """

    module: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    batch: Tensor
    target: Tensor
    microbatches: int


class DecoderStage(nn.Module):
    """A stage of a decoder as a user of torch.distributed.pipelining writes it.

    Some of its layers; on the first stage the embedding, on the last one norm and head.
    """

    embedding: nn.Module | None
    layers: nn.ModuleList
    rotary: nn.Module
    norm: nn.Module | None
    head: nn.Module | None

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = x if self.embedding is None else self.embedding(x)
        rotary = self.rotary(hidden, torch.arange(hidden.shape[1], device=x.device)[None])
        for layer in self.layers:
            hidden = layer(hidden, position_embeddings=rotary)
        if self.norm is not None and self.head is not None:
            hidden = self.head(self.norm(hidden))
        return hidden


class Mean:
    """The mean over the microbatches of what the work's loss gives for each, as torch makes it."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._function = function

    def weight(self, microbatch: Microbatch) -> int:
        return 1

    def total(self, output: Tensor, microbatch: Microbatch) -> Tensor:
        return self._function(output, microbatch["target"])


def ours(work: Work, schedule: ScheduleLike, ranks: int, **how: Any) -> tuple[Pipeline, Callable[[], object]]:
    """penstock's pipeline and its step: of this process's rank, or of all ranks where no other process is.

    how: other options of Pipeline.from_provider
    """
    pipe = Pipeline.from_provider(
        lambda stage: work.module(), schedule=schedule, ranks=ranks, microbatches=work.microbatches,
        loss_fn=Mean(work.loss), device=work.batch.device, timeout=60, **how,
    )  # fmt: skip
    batch = {"x": work.batch, "target": work.target}
    return pipe, lambda: pipe.step(batch)


class Torch(NamedTuple):
    """torch's stages of one rank, its runner, and its step."""

    stages: list[PipelineStage]
    runner: Any
    step: Callable[[], object]


def theirs(work: Work, schedule: str, rank: int, ranks: int) -> Torch:
    """torch's, told the shapes that cross its edges, and not asked to keep outputs."""
    row = work.batch[: len(work.batch) // work.microbatches]
    placed = placement(schedule, ranks)
    stages = [
        PipelineStage(
            work.module().to(work.batch.device),
            stage,
            placed.stages,
            work.batch.device,
            input_args=torch.empty_like(row).requires_grad_(stage > 0),
            output_args=torch.empty_like(row).requires_grad_(),
        )
        for stage in placed.stages_of(rank)
    ]
    of_rank: Any = stages[0] if schedule in SCHEDULES else stages
    runner = TORCH[schedule](of_rank, work.microbatches, loss_fn=work.loss)

    def step() -> None:
        inputs = (work.batch,) if placed.rank_of[0] == rank else ()
        target = work.target if placed.rank_of[-1] == rank else None
        runner.step(*inputs, target=target, return_outputs=False)

    return Torch(stages, runner, step)


def torch_programs(schedule: str, runner: Any) -> list[list[str]] | None:
    """The ops of torch's order, by rank, as text; None where it is penstock's."""
    if schedule in SCHEDULES:
        return None
    order = runner.pipeline_order
    return [[str(action) for action in order[rank] if action is not None] for rank in sorted(order)]


def as_schedule(name: str, programs: list[list[str]], ranks: int, microbatches: int) -> Schedule:
    """torch's order as a schedule; overlapped pairs one after the other, as torch runs them."""
    computes = re.compile(r"\d+[FBIW]\d+")  # beside sharding and reducing, which take no time here
    ops = [[Op.parse(op) for text in program for op in computes.findall(text)] for program in programs]
    return Schedule(name, placement(name, ranks), microbatches, tuple(map(tuple, ops)))


class Block(nn.Module):
    """Half of a transformer's layer: no attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return result
