from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from penstock import AutoPipeline, Pipeline
from penstock.errors import ConfigError
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
