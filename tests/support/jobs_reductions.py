"""What a step's timeline tells of the gradients' sums beside the pipeline, run by the pool's workers."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from penstock import AutoPipeline, Axes
from penstock.schedule import Timeline, render
from support.families import tiny_model
from support.jobs_mesh import batch, own_part

CLOCK = 0.1  # seconds that the processes' clocks may seem to differ


def steps(schedule: Any, folder: str) -> tuple[Timeline, float]:
    """The timeline of the second of two steps at pp=2 x dp_shard=2, and the bubble that all ranks were told.

    The first rank's last backward goes on until the last rank sums gradients.
    """
    torch.set_num_threads(1)
    pipe: Any = AutoPipeline(
        ranks=2, schedule=schedule, microbatches=4, timeout=30, axes=Axes(dp_shard=2)
    ).build(tiny_model("qwen3", torch.float64, layers=4))
    mine = own_part(batch(), *pipe.batch_part)
    pipe.step(mine)
    (executor,) = pipe._training.executors
    _wait_for_sums(executor, pipe.batch_part[0])
    result = pipe.step(mine)
    timeline = pipe.timeline
    pipe.close()
    if dist.get_rank() == 0:
        for ending in ("svg", "html", "txt", "json"):
            render(timeline, Path(folder) / f"step.{ending}", unit="s")
    return timeline, result.bubble


def _wait_for_sums(executor: Any, part: int) -> None:
    store, key = dist.distributed_c10d._get_default_store(), f"sums of part {part}"
    own = [op for op in executor.plan.schedule.programs[executor.plan.rank] if op.kind != "F"]
    stage = executor.stages[own[-1].stage]
    if executor.plan.rank == 0:
        backward = stage.backward

        def late(number: int, gradients: Any) -> Any:
            if number == own[-1].microbatch:
                store.wait([key], timedelta(seconds=30))
                time.sleep(CLOCK)
            return backward(number, gradients)

        stage.backward = late
    else:
        reduce = stage.reduce

        def telling() -> None:
            store.set(key, "begun")
            reduce()

        stage.reduce = telling
