"""A batch becomes as many microbatches as are asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock import AutoPipeline
from penstock.errors import BatchError, ConfigError, InputError
from support.counted import assert_exact, made
from support.families import ragged_batch, tiny_model
from support.pairs import pair_batch
from support.ragged import ragged
from support.reference import assert_gradients, gradients_of, plain_step
from support.refusals import refuses


def test_a_batch_of_tensors_is_split_into_as_many_as_are_asked_for() -> None:
    model, batch = tiny_model("llama", torch.float64), ragged_batch()
    pipe = made(model)
    loss, expected = plain_step(model, batch)
    for count in (None, 8, 1, 3):
        pipe.zero_grad()
        assert pipe.step(batch, microbatches=count).loss == pytest.approx(loss, rel=1e-10)
        assert_gradients(gradients_of(pipe), expected, 1e-10)
        assert pipe.timeline.microbatches == (count or 4) == len(pipe.microbatches(batch, count))
    assert len(pipe.microbatches(ragged(7))) == 7
    assert pipe.verify_against(model, ragged(5)).passed
    pipe.step(batch, microbatches=8)
    assert len(pipe.costs().activation[0]) == 8  # type: ignore[index, arg-type]


@pytest.fixture(scope="module")
def built() -> tuple[Any, Any]:
    """A model and its pipeline."""
    model = tiny_model("llama", torch.float64)
    return model, made(model)


@pytest.mark.parametrize(
    ("batch", "count", "error", "value", "rule"),
    [
        (ragged_batch(3), 5, BatchError, "a batch of 3 rows", "5 microbatches"),
        (ragged_batch(3), 10**6, BatchError, "a batch of 3 rows", "1000000"),  # before a schedule is made
        (ragged_batch(3), 0, ConfigError, "microbatches=0", "whole number"),
        (ragged_batch(3), "2", ConfigError, "microbatches='2'", "whole number"),
        (ragged(3), 2, BatchError, "a list of 3 microbatches", "this call has 2"),
        ([], None, BatchError, "a list of 0 microbatches", "at least 1"),
        (None, None, BatchError, "a batch given as NoneType", "a mapping from names"),
    ],
)
def test_a_number_that_is_none_or_that_a_batch_does_not_have(
    built: tuple[Any, Any], batch: Any, count: Any, error: type[InputError], value: str, rule: str
) -> None:
    model, pipe = built
    with refuses(error, value, rule):
        pipe.step(batch, microbatches=count)
    assert_exact(pipe, model, ragged(5))


@pytest.mark.parametrize("microbatches", [1, 3, 4])
def test_a_functions_groups_are_not_split(microbatches: int) -> None:
    """Before groups could be declared, 8 rows in 3 microbatches gave a loss of pairs of 1.155, not 0.693."""

    def of_pairs(logits: Tensor, microbatch: Mapping[str, Any]) -> Tensor:
        assert len(logits) % 2 == 0
        sums = logits.flatten(1).logsumexp(1)
        return -torch.nn.functional.logsigmoid(sums[::2] - sums[1::2]).mean()

    of_pairs.rows_per_group = 2  # type: ignore[attr-defined]
    model, batch = tiny_model("llama", torch.float64), pair_batch(4)
    pipe = AutoPipeline(ranks=2, microbatches=microbatches, loss_fn=of_pairs).build(model)
    whole = of_pairs(model(input_ids=batch["input_ids"], use_cache=False).logits, batch).detach()
    assert pipe.step(batch).loss == pytest.approx(float(whole), rel=1e-12)
    assert pipe.evaluate(batch).loss == pytest.approx(float(whole), rel=1e-12)
    with refuses(BatchError, "microbatch 1 of 3 rows", "each group of 2"):
        pipe.step([{name: value[at] for name, value in batch.items()} for at in (slice(0, 2), slice(2, 5))])
    with refuses(BatchError, "a batch of 7 rows", "no group is split"):
        pipe.step({name: value[:7] for name, value in batch.items()})
