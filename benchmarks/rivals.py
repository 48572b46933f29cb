"""The same step by penstock and by torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from penstock import Pipeline
from penstock.runtime.shapes import Microbatch

SCHEDULES = ("gpipe", "1f1b")
_TORCH: dict[str, type[PipelineScheduleSingle]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class Work(NamedTuple):
    """What one step computes; the same for both. `module` makes the module of any stage.

    batch: rows for the first stage to read, and targets of the same rows for the loss
    """

    module: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    batch: Tensor
    target: Tensor
    microbatches: int


class Mean:
    """The mean over the microbatches of what the work's loss gives for each, as torch makes it."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._function = function

    def weight(self, microbatch: Microbatch) -> int:
        return 1

    def total(self, output: Tensor, microbatch: Microbatch) -> Tensor:
        return self._function(output, microbatch["target"])


def ours(work: Work, schedule: str, ranks: int) -> tuple[Pipeline, Callable[[], object]]:
    """penstock's pipeline and its step: of this process's rank, or of all ranks where no other process is."""
    pipe = Pipeline.from_provider(
        lambda stage: work.module(), schedule=schedule, ranks=ranks, microbatches=work.microbatches,
        loss_fn=Mean(work.loss), device="cpu", timeout=60,
    )  # fmt: skip
    batch = {"x": work.batch, "target": work.target}
    return pipe, lambda: pipe.step(batch)


def theirs(work: Work, schedule: str, rank: int, ranks: int) -> tuple[PipelineStage, Callable[[], object]]:
    """torch's stage and its step, told the shapes that cross its edges, and not asked to keep outputs."""
    row = work.batch[: len(work.batch) // work.microbatches]
    received = torch.empty_like(row).requires_grad_(rank > 0)
    given = torch.empty_like(row).requires_grad_()
    stage = PipelineStage(
        work.module(), rank, ranks, torch.device("cpu"), input_args=received, output_args=given
    )
    runner = _TORCH[schedule](stage, work.microbatches, loss_fn=work.loss)

    def step() -> None:
        inputs = (work.batch,) if rank == 0 else ()
        target = work.target if rank == ranks - 1 else None
        runner.step(*inputs, target=target, return_outputs=False)

    return stage, step
