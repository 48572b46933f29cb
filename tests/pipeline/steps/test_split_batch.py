"""A batch becomes as many microbatches as are asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.errors import BatchError, ConfigError, InputError
from support.counted import assert_exact, made
from support.families import ragged_batch, tiny_model
from support.ragged import ragged
from support.reference import assert_gradients, gradients_of, plain_step


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


@pytest.mark.parametrize(
    ("batch", "count", "error", "said"),
    [
        (ragged_batch(3), 5, BatchError, "a batch of 3 rows: it is to be split into 5 microbatches"),
        (ragged_batch(3), 10**6, BatchError, "a batch of 3 rows"),  # before a schedule is made
        (ragged_batch(3), 0, ConfigError, "microbatches=0: a schedule has a whole number"),
        (ragged_batch(3), "2", ConfigError, "microbatches='2': a schedule has a whole number"),
        (ragged(3), 2, BatchError, "a list of 3 microbatches: this call has 2"),
        ([], None, BatchError, "a list of 0 microbatches"),
        (None, None, BatchError, "a batch given as NoneType"),
    ],
)
def test_a_number_that_is_none_or_that_a_batch_does_not_have(
    batch: Any, count: Any, error: type[InputError], said: str
) -> None:
    model = tiny_model("llama", torch.float64)
    pipe = made(model)
    with pytest.raises(error, match=said):
        pipe.step(batch, microbatches=count)
    assert_exact(pipe, model, ragged(5))
