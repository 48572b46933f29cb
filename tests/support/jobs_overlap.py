"""Pipelines whose pairs run side by side, run by the pool's workers."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock import AutoPipeline, Axes
from penstock.errors import PeerError
from support.families import tiny_model
from support.jobs_mesh import batch, full, own_part
from support.reference import plain_step

MICROBATCHES = 6
ROWS = 24  # of the whole batch


def ran_side_by_side(pipe: Any) -> int:
    return sum(executor.overlapped for executor in pipe._training.executors)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "penstock-backward" in thread.name]


def mixture(schedule: Any, options: dict[str, Any], steps: int = 3) -> dict[str, Any]:
    """Steps of a mixture at pp=2 x dp_shard=2 x ep=2: each loss, and the gradients of each step alone."""
    torch.set_num_threads(1)
    options = dict(options)
    sizes = options.pop("model", {})
    model = tiny_model("mixtral", torch.float64, layers=4, **sizes)
    whole = batch(ROWS)
    loss, expected = plain_step(model, whole)
    axes = Axes(dp_shard=2, ep=2)
    pipe = AutoPipeline(
        ranks=2, schedule=schedule, microbatches=MICROBATCHES, timeout=30, axes=axes, **options
    ).build(model)
    mine = own_part(whole, *pipe.batch_part)
    worst, losses, ran, peaks = 0.0, [], [], []
    for _ in range(steps):
        pipe.zero_grad()
        losses.append(pipe.step(mine).loss)
        ran.append(ran_side_by_side(pipe))
        peaks.append(pipe.timeline.peak_live)
        for name, parameter in pipe.named_parameters(remove_duplicate=False):
            assert parameter.grad is not None, name
            difference = float((full(parameter.grad) - expected[name]).abs().max())
            worst = max(worst, difference / max(float(expected[name].abs().max()), 1e-300))
    timeline, proven = pipe.timeline, pipe.proof.peak_live
    at = {span.op: span.start for span in timeline.of_rank(pipe._training.executors[0].plan.rank)}
    ahead = sum(at[pair.backward] <= at[pair.forward] for pair in timeline.overlaps if pair.forward in at)
    pipe.close()
    return {
        "losses": losses, "expected": loss, "worst": worst, "ran": ran, "peaks": peaks, "proven": proven,
        "backward_first": ahead, "bubble": timeline.bubble, "busy": timeline.busy,
        "makespan": timeline.makespan, "threads": threads(),
    }  # fmt: skip


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, broken: list[str]) -> Tensor:
        ctx.broken = broken
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        if "backward" in ctx.broken and threading.current_thread() is not threading.main_thread():
            raise ValueError("broken on purpose")
        return gradients[0], None


def failing(schedule: Any, where: str) -> dict[str, Any]:
    """The third step fails on the last rank's process, within a pair's forward or backward."""
    torch.set_num_threads(1)
    model = tiny_model("mixtral", torch.float64, layers=4)
    broken: list[str] = []
    pipe: Any = None

    def around(module: nn.Module) -> nn.Module:
        def hook(part: nn.Module, args: Any, output: Any) -> Any:
            thread = None if pipe is None else pipe._training.executors[0].overlap_thread
            if "forward" in broken and thread is not None and thread.busy:
                raise ValueError("broken on purpose")
            return _Fails.apply(output, broken)  # type: ignore[no-untyped-call]

        for name, part in module.named_modules():
            if name.endswith("mlp"):
                part.register_forward_hook(hook)
        return module

    pipe = AutoPipeline(
        ranks=2, schedule=schedule, microbatches=MICROBATCHES, timeout=8, axes=Axes(dp_shard=2, ep=2),
        parallelize_fn=around,
    ).build(model)  # fmt: skip
    mine = own_part(batch(ROWS), *pipe.batch_part)
    for _ in range(2):
        pipe.step(mine)
    before = ran_side_by_side(pipe)
    if dist.get_rank() == dist.get_world_size() - 1:
        broken.append(where)
    try:
        pipe.step(mine)
    except (ValueError, PeerError) as error:
        told = type(error).__name__, str(error), [*getattr(error, "__notes__", ())]
    else:
        told = "nothing", "", []
    return {"told": told, "threads": threads(), "ran": before}
