"""Pairs of ops at the same time, with expert parallelism: exact, and an error ends the step on every rank."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock import Axes
from penstock.errors import PeerError
from support.families import tiny_model
from support.mesh import batch, build_whole, later, own_part, worst_gradient
from support.pool import Pool
from support.reference import plain_step

MICROBATCHES = 6
ROWS = 24  # of the whole batch


def overlapped(pipe: Any) -> int:
    return sum(executor.overlapped for executor in pipe._training.executors)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "penstock-backward" in thread.name]


def recomputed_mixture(schedule: Any) -> None:
    """Steps of a mixture at pp=2 x dp_shard=2 x ep=2."""
    model, whole = tiny_model("mixtral", torch.float64, layers=4), batch(ROWS)
    loss, expected = plain_step(model, whole)
    options = {"schedule": schedule, "microbatches": MICROBATCHES, "activation_checkpointing": True}
    pipe = build_whole(model, 2, Axes(dp_shard=2, ep=2), **options)
    mine = own_part(whole, *pipe.batch_part)
    ran = []
    for _ in range(3):
        pipe.zero_grad()
        assert pipe.step(mine).loss == pytest.approx(loss, rel=1e-10)
        worst, name = worst_gradient(pipe, expected)
        assert worst < 1e-10, (worst, name)
        assert pipe.timeline.peak_live == pipe.proof.peak_live
        ran.append(overlapped(pipe))
    each_step = ran[1] - ran[0]
    assert ran[2] - ran[1] == each_step > 0, ran  # once all forwards are known
    timeline = pipe.timeline
    at = {span.op: span.start for span in timeline.of_rank(pipe._training.executors[0].plan.rank)}
    ahead = sum(at[pair.backward] <= at[pair.forward] for pair in timeline.overlaps if pair.forward in at)
    assert ahead == each_step, "in one thread the forward of a pair would start first"
    assert 0 <= timeline.bubble < 1
    assert max(timeline.busy) <= timeline.makespan
    pipe.close()
    assert not threads()


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

    options = {"schedule": schedule, "microbatches": MICROBATCHES, "timeout": 8, "parallelize_fn": around}
    pipe = build_whole(model, 2, Axes(dp_shard=2, ep=2), **options)
    mine = own_part(batch(ROWS), *pipe.batch_part)
    for _ in range(2):
        pipe.step(mine)
    before = overlapped(pipe)
    if dist.get_rank() == dist.get_world_size() - 1:
        broken.append(where)
    try:
        pipe.step(mine)
    except (ValueError, PeerError) as error:
        raised = type(error).__name__, [*getattr(error, "__notes__", ())]
    else:
        raised = "nothing", []
    return {"error": raised, "threads": threads(), "ran": before}


PAIRED = {"schedule": "1f1b", "paired": True}


@pytest.mark.parametrize("schedule", later(("dualpipe_v",), (PAIRED,)), ids=str)
def test_a_recomputed_mixture_as_one_process(pool: Pool, schedule: Any) -> None:
    pool.run(4, recomputed_mixture, schedule)


@pytest.mark.parallel
@pytest.mark.parametrize("schedule", ["dualpipe_v", PAIRED], ids=str)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_error_within_a_pair_ends_the_step_on_all_ranks(pool: Pool, schedule: Any, where: str) -> None:
    *others, failed = pool.run(4, failing, schedule, where)
    kind, notes = failed["error"]
    assert kind == "ValueError"
    assert ("F" if where == "forward" else "B") in notes[0].split(" in ")[1].split(",")[0]
    for result in others:
        assert result["error"][0] in ("PeerLostError", "StalledPeerError"), result["error"]
    for result in (*others, failed):
        assert result["ran"] > 0
        assert not result["threads"]
