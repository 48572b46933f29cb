"""What a step is predicted to hold, what it reports, and what is counted from outside."""

from __future__ import annotations

import functools
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import Pipeline
from penstock.batch.shapes import microbatch_key
from penstock.runtime.device import footprints
from penstock.runtime.device.footprints import (
    Footprint,
    Footprints,
    ForwardKey,
)
from penstock.runtime.device.memory import Measured


def test_what_is_gone_is_not_counted() -> None:
    with Measured() as measured:
        kept = torch.ones(100)
        gone = torch.ones(1000) * 2
        assert measured.nbytes == 4400
        view = gone[:10]
        del gone
        assert measured.nbytes == 4400
        del view
        assert measured.nbytes == kept.nbytes


def storages(tensors: list[Tensor]) -> list[torch.UntypedStorage]:
    return [tensor.untyped_storage() for tensor in tensors]


def test_a_measurement_does_not_keep_the_weights_that_it_leaves_out() -> None:
    """Each pipeline with dp_shard stayed alive for good, with its process groups and their threads."""
    gathered = torch.zeros(4)
    weights = [gathered]
    with Measured(functools.partial(storages, weights)) as measured:
        kept = torch.ones(8)
        weights.append(torch.ones(2))
    assert (measured.nbytes, measured.own_bytes) == (kept.nbytes + 8, kept.nbytes)
    gone = weakref.ref(gathered)
    del gathered, weights
    gc.collect()
    assert gone() is None


class Wide(nn.Module):
    """Under autocast a stage keeps the cast of the product's weight, and torch that of the convolution's."""

    def __init__(self, product: bool) -> None:
        super().__init__()
        self.inner: Any = nn.Linear(64, 64, bias=False) if product else nn.Conv1d(64, 64, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = x + self.inner(x)
        return hidden


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("product", [True, False])
def test_no_microbatch_counts_the_cast_of_a_weight(schedule: str, product: bool) -> None:
    """0.5.0: the first forward of a shape, or each one, was counted with the copy in half precision."""
    pipe = Pipeline.from_provider(
        lambda info: Wide(product), ranks=2, microbatches=4, schedule=schedule,
        loss_fn=lambda output, microbatch: output.mean(),
    )  # fmt: skip
    x = torch.randn(8, 64) if product else torch.randn(8, 64, 1)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            pipe.step({"x": x})
        held: Any = pipe.costs().activation
        assert held[0] == [2 * 64 * 2] * 4, "the input in half precision"
        assert held[1] == held[1][:1] * 4
        assert held[1][0] < 64 * 64 * 2
        pipe.zero_grad()
    assert max(each.total for each in pipe.memory) < 64 * 64 * 2


def forward_key(rows: int, length: int) -> ForwardKey:
    batch = {"input_ids": torch.zeros(rows, length), "labels": torch.zeros(rows, length)}
    return ForwardKey(microbatch_key(batch), split=False, recompute=False, training=True, autocast=False)


# _REMEMBERED: fewer, so that some are forgotten
def test_of_too_many_shapes_the_oldest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(footprints, "_REMEMBERED", 2)
    known = Footprints()
    for length in (1, 4, 9):
        known.add(forward_key(2, length), Footprint(length, 5), provisional=False)
    assert known.find(forward_key(2, 1)) is None
    assert known.find(forward_key(2, 9)) == (Footprint(9, 5), False)
