from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from penstock import AutoPipeline, Axes, Pipeline
from penstock.errors import ConfigError
from support.covering import every
from support.families import ragged_batch, tiny_model
from support.pool import Pool

CALLS: dict[str, Callable[[Pipeline], Any]] = {
    "step()": lambda pipe: pipe.step(ragged_batch()),
    "evaluate()": lambda pipe: pipe.evaluate(ragged_batch()),
    "costs()": lambda pipe: pipe.costs(),
    "clip_grad_norm_()": lambda pipe: pipe.clip_grad_norm_(1.0),
}


def different(first: str, second: str) -> None:
    """Rank 0 makes one call and rank 1 another; then both make the same."""
    pipe = AutoPipeline(ranks=2, microbatches=2).build(tiny_model("llama", layers=2))
    pipe.step(ragged_batch())
    with pytest.raises(ConfigError) as error:
        CALLS[first if pipe.processes.index == 0 else second](pipe)
    assert str(error.value).startswith(f"{first} on rank 0, {second} on rank 1: these methods are collective")
    pipe.step(ragged_batch())
    pipe.close()


@pytest.mark.parametrize(("first", "second"), [("costs()", "step()"), ("clip_grad_norm_()", "evaluate()"),
                                               ("clip_grad_norm_()", "costs()")])  # fmt: skip
def test_different_calls_on_two_ranks_are_named(pool: Pool, first: str, second: str) -> None:
    """0.5.0: they hung until the timeout, or took each other's numbers."""
    pool.run(2, different, first, second)


def different_on_a_mesh(ranks: int, axes: Axes, calls: list[str]) -> str:
    """The error where one process of four calls another method; then all call the same ones."""
    pipe = AutoPipeline(ranks=ranks, microbatches=2, axes=axes).build(tiny_model("llama", layers=2))
    pipe.step(ragged_batch())
    with pytest.raises(ConfigError) as error:
        CALLS[calls[dist.get_rank()]](pipe)
    for call in CALLS.values():
        call(pipe)
    pipe.close()
    return str(error.value)


MESHES = [(2, Axes(dp_shard=2), "costs()"), (2, Axes(tp=2), "step()"), (1, Axes(dp_shard=4), "costs()")]


@pytest.mark.parametrize(("ranks", "axes", "first"), every(2, MESHES))
def test_different_calls_on_a_mesh_are_named(pool: Pool, ranks: int, axes: Axes, first: str) -> None:
    """0.5.0: they hung until the timeout. A call of one pipeline may begin with a group of another axis."""
    calls = [first, *["step()" if first == "costs()" else "clip_grad_norm_()"] * 3]
    words = ", ".join(f"{name} on rank {rank}" for rank, name in enumerate(calls))
    for found in pool.run(4, different_on_a_mesh, ranks, axes, calls):
        assert found.startswith(f"{words}: these methods are collective")
