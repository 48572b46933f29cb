"""The timeline of a step shows when each stage's gradients were summed over the mesh."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from penstock import Axes
from penstock.schedule import Timeline, render
from support.families import tiny_model
from support.mesh import batch, build_whole, own_part
from support.pool import Pool

CLOCK = 0.1  # seconds that the processes' clocks may seem to differ


# _training: the recorder of a rank is reached there alone
def timed_steps(folder: str) -> tuple[Timeline, float]:
    """The timeline of the second of two steps at pp=2 x dp_shard=2, and its bubble.

    Each rank has two stages, of which one is done before the other.

    The first rank's last backward goes on until the last rank sums gradients.
    """
    schedule = {"schedule": "hanayo", "waves": 1}
    pipe: Any = build_whole(tiny_model("qwen3"), 2, Axes(dp_shard=2), schedule=schedule, microbatches=4)
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


def test_each_stage_is_summed_once_after_its_last_backward(pool: Pool, tmp_path: Path) -> None:
    for timeline, bubble in pool.run(4, timed_steps, str(tmp_path)):
        stages = sorted({span.op.stage for span in timeline.spans})
        assert sorted(of.stage for of in timeline.reductions) == stages
        ends: dict[tuple[int, int], float] = {}
        for span in timeline.spans:
            ends[span.rank, span.op.stage] = max(span.end, ends.get((span.rank, span.op.stage), 0.0))
        for of in timeline.reductions:
            assert ends[of.rank, of.stage] <= of.start < of.end
        for span in timeline.spans:  # a rank does one thing at a time
            for of in timeline.reductions:
                assert of.rank != span.rank or of.end <= span.start or span.end <= of.start
        on_last = [of for of in timeline.reductions if of.rank == 1]
        assert min(of.start for of in on_last) < max(s.end for s in timeline.of_rank(0))
        assert bubble == pytest.approx(timeline.bubble)
        for rank, idle in enumerate(timeline.idle):
            sums = sum(of.end - of.start for of in timeline.reductions if of.rank == rank)
            assert idle.reduce == pytest.approx(sums)
            assert sum(idle) + timeline.busy[rank] == pytest.approx(timeline.makespan)
            assert min(idle) >= -1e-9
    for ending in ("svg", "html", "txt"):
        assert "reducing gradients across data-parallel ranks" in (tmp_path / f"step.{ending}").read_text()
